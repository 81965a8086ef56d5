"""Command-line flags made from the engine's and the sampler's own records: one set of defaults."""

from __future__ import annotations

import argparse
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from k26jax.config import EngineConfig
from k26jax.errors import RequestError

ENVIRONMENT_PREFIX = "K26JAX_"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every field of EngineConfig; `K26JAX_<FIELD>` sets it too."""
    hints = typing.get_type_hints(EngineConfig)
    group = parser.add_argument_group("engine")
    for item in fields(EngineConfig):
        flag = "--" + item.name.replace("_", "-")
        shown = "required" if item.name == "model_path" else f"default: {item.default}"
        group.add_argument(
            flag,
            *item.metadata.get("aliases", []),
            dest=item.name,
            type=_reader(item.name, hints[item.name]),
            choices=item.metadata.get("choices"),
            default=None,
            metavar=item.name.rpartition("_")[2].upper(),
            help=f"{item.metadata['help']} ({shown})".replace("%", "%%"),
        )


def engine_options(
    args: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Returns the engine options given by flag, or else by environment variable.

    Raises: RequestError if there is no model path, or a variable cannot be read.
    """
    hints = typing.get_type_hints(EngineConfig)
    options = {}
    for item in fields(EngineConfig):
        value = getattr(args, item.name)
        name = ENVIRONMENT_PREFIX + item.name.upper()
        if value is None and name in environment:
            try:
                value = _reader(item.name, hints[item.name])(environment[name])
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise RequestError(f"{name} = {environment[name]!r}: {error}") from None
        if value is not None:
            options[item.name] = value
    if "model_path" not in options:
        raise RequestError("no model given; use --model-path FOLDER or K26JAX_MODEL_PATH")
    return options


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Adds the flags of SamplingParams that fit a command line."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=1.0, help="0: greedy (default: 1.0)")
    group.add_argument("--top-k", type=int, default=0, help="0: off (default)")
    group.add_argument("--top-p", type=float, default=1.0, help="1: off (default)")
    group.add_argument("--min-p", type=float, default=0.0, help="0: off (default)")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, help=f"(default: {max_tokens})"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="may be given repeatedly")
    group.add_argument("--stop-token-id", action="append", type=int, metavar="ID")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end token")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of SamplingParams that the flags give."""
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "ignore_eos")
    return {name: getattr(args, name) for name in names} | {"stop_token_ids": args.stop_token_id}


def _reader(name: str, hint: Any):
    kinds = {kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None)}
    if kinds != {int}:
        return str
    return tokens if name == "context_length" else int


def tokens(text: str) -> int:
    """Returns a number of tokens; `64k` means 65536.

    Raises: ArgumentTypeError if the text is no number.
    """
    match = re.fullmatch(r"(\d+)([kKmM]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens like 4096 or 64k")
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]
