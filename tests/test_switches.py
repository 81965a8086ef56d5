"""Options that are on or off: a flag, its opposite, a variable; the prefix cache's other names."""

from __future__ import annotations

import argparse

import pytest

from k26jax.commands import serve
from k26jax.commands.options import add_engine_options, engine_options
from k26jax.errors import RequestError

VARIABLE = "K26JAX_ENABLE_PREFIX_CACHING"


def test_a_switch_is_a_flag_its_opposite_and_a_variable():
    parser = argparse.ArgumentParser()
    add_engine_options(parser, enable_prefix_caching=True)
    for argv, environment, expected in (
        ([], {}, True),
        ([], {VARIABLE: "off"}, False),
        (["--no-enable-prefix-caching"], {VARIABLE: "1"}, False),
        (["--enable-prefix-caching"], {VARIABLE: "0"}, True),
    ):
        args = parser.parse_args(["--model", "m", *argv])
        assert engine_options(args, environment)["enable_prefix_caching"] is expected
    with pytest.raises(RequestError, match=rf"{VARIABLE} = 'often': expected one of 1, true, on"):
        engine_options(parser.parse_args(["--model", "m"]), {VARIABLE: "often"})


def test_a_server_has_a_prefix_cache_unless_it_is_told_not_to():
    parser = argparse.ArgumentParser()
    serve.add(parser.add_subparsers())
    for flags, expected in (
        ([], {"enable_prefix_caching": True}),
        (["--disable-radix-cache"], {"enable_prefix_caching": False}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (
            ["--prefix-cache-tokens", "64k"],
            {"enable_prefix_caching": True, "prefix_cache_tokens": 65536},
        ),
    ):
        options = engine_options(parser.parse_args(["serve", "--model-path", "m", *flags]), {})
        assert options == {"model_path": "m", "max_running_requests": 4} | expected
