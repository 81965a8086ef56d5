"""Flags and environment variables of the engine's options."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

import k26jax
from k26jax.cli import Parser, main
from k26jax.commands.options import add_engine_options, engine_options, tokens
from k26jax.config import EngineConfig


def test_a_variable_sets_what_no_flag_does(capsys):
    parser = Parser()
    add_engine_options(parser)
    environment = {
        "K26JAX_MODEL_PATH": "folder",
        "K26JAX_CONTEXT_LENGTH": "64k",
        "K26JAX_SEED": "3",
        "K26JAX_DTYPE": "",
        "K26JAX_SPECULATIVE_DDTREE_BUGDET": "5",
        "PATH": "x",
    }
    args = parser.parse_args(["--random-seed", "4", "--max-num-seqs", "2"])
    assert engine_options(args, environment) == {
        "model_path": "folder",
        "context_length": 65536,
        "max_running_requests": 2,
        "seed": 4,
    }
    assert "did you mean 'K26JAX_SPECULATIVE_DDTREE_BUDGET'" in capsys.readouterr().err
    for name in ("K26JAX_SEED", "K26JAX_CONTEXT_LENGTH"):
        with pytest.raises(k26jax.errors.RequestError, match=f"{name} = 'many'"):
            engine_options(parser.parse_args(["--model", "m"]), {name: "many"})


def test_a_budget_is_a_number_or_auto(capsys):
    parser = Parser()
    add_engine_options(parser)
    for text, value in (("8", 8), ("auto", "auto")):
        args = parser.parse_args(["--model", "m", "--ddtree-budget", text])
        assert engine_options(args, {})["speculative_ddtree_budget"] == value
        variable = {"K26JAX_MODEL_PATH": "m", "K26JAX_SPECULATIVE_DDTREE_BUDGET": text}
        found = engine_options(parser.parse_args([]), variable)
        assert found["speculative_ddtree_budget"] == value
    assert main(["generate", "x", "--model", "m", "--ddtree-budget", "some"]) == 2
    assert "'some', expected an integer from 0 to 254, or 'auto'" in capsys.readouterr().err


def test_every_field_has_its_variable():
    parser = Parser()
    add_engine_options(parser)
    args = parser.parse_args([])
    environment = {f"K26JAX_{item.name.upper()}": "7" for item in fields(EngineConfig)}
    environment["K26JAX_ENABLE_PREFIX_CACHING"] = "on"
    found = engine_options(args, environment)
    assert found.keys() == {item.name for item in fields(EngineConfig)}
    assert found["steps_per_dispatch"] == 7
    assert found["speculative_draft_model_path"] == "7"
    assert found["enable_prefix_caching"] is True


def test_a_command_may_have_its_own_default():
    parser = Parser()
    add_engine_options(parser, max_running_requests=4)
    assert "run (default: 4)" in " ".join(parser.format_help().split())
    for argv, environment, expected in (
        ([], {}, 4),
        ([], {"K26JAX_MAX_RUNNING_REQUESTS": "3"}, 3),
        (["--max-num-seqs", "2"], {"K26JAX_MAX_RUNNING_REQUESTS": "3"}, 2),
    ):
        args = parser.parse_args(["--model", "m", *argv])
        assert engine_options(args, environment)["max_running_requests"] == expected


def test_token_counts_take_a_suffix():
    assert (tokens("64k"), tokens("512"), tokens("1M")) == (65536, 512, 1048576)
    for text in ("", "k", "-1", "1.5k", "64kb", "٣"):
        with pytest.raises(argparse.ArgumentTypeError, match="no number of tokens"):
            tokens(text)
