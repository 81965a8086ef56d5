"""Command-line flags made from the engine's and the sampler's own records: one set of defaults."""

from __future__ import annotations

import argparse
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from k26jax.commands.terminal import say
from k26jax.config import EngineConfig
from k26jax.engine.request import SamplingParams
from k26jax.errors import ConfigError, RequestError, nearest

ENVIRONMENT_PREFIX = "K26JAX_"
MEASURED_ALGORITHMS = ("NONE", "DDTREE")
_DEFAULTS = {item.name: item.default for item in fields(SamplingParams)}
_TOKENS = ("context_length", "prefix_cache_tokens")
_SWITCHES = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
# Field, type, metavar, help.
_SAMPLING = (
    ("temperature", float, "T", "0: greedy"),
    ("top_k", int, "K", "keep the K most likely tokens; 0: all"),
    ("top_p", float, "P", "keep the most likely tokens of probability P together; 1: all"),
    ("min_p", float, "P", "keep tokens at least P times as likely as the likeliest; 0: all"),
)


def add_engine_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds a flag for every field of EngineConfig.

    Args:
      defaults: values of this command that differ from EngineConfig's.
    """
    parser.set_defaults(engine_defaults=defaults)
    group = parser.add_argument_group(
        "engine",
        f"Each of these may be set in the environment too: {ENVIRONMENT_PREFIX} and the flag's "
        f"name in capitals, such as {_variable('model_path')}. The flag wins.",
    )
    for item in fields(EngineConfig):
        default = defaults.get(item.name, item.default)
        shown = ""
        if item.name == "model_path":
            shown = " (required)"
        elif default is not None:
            shown = f" (default: {default})"
        reader = _readers()[item.name]
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if reader is not switch:
            kind = {
                "type": reader,
                "choices": item.metadata.get("choices"),
                "metavar": item.name.rpartition("_")[2].upper(),
            }
        group.add_argument(
            "--" + item.name.replace("_", "-"),
            *item.metadata.get("aliases", []),
            dest=item.name,
            default=None,
            help=(item.metadata["help"] + shown).replace("%", "%%"),
            **kind,
        )


def engine_options(
    args: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
    *,
    needs_model: bool = True,
) -> dict[str, Any]:
    """Returns the engine options that a flag gives, or else a variable, or else the command.

    An empty variable counts as not set. This is the only place that reads them.

    Raises: RequestError if there is no model path, or a variable cannot be read.
    """
    known = {_variable(item.name) for item in fields(EngineConfig)}
    for variable in environment:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            say(f"note: no option reads the variable {variable}{nearest(variable, known)}")
    options = dict(args.engine_defaults)
    for name, reader in _readers().items():
        value = getattr(args, name)
        text = environment.get(_variable(name))
        if value is None and text:
            try:
                value = reader(text)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise RequestError(f"{_variable(name)} = {text!r}: {error}") from None
        if value is not None:
            options[name] = value
    if needs_model and "model_path" not in options:
        raise RequestError(f"no model given; use --model-path FOLDER or {_variable('model_path')}")
    return options


def served_options(args: argparse.Namespace, *, needs_model: bool = True) -> dict[str, Any]:
    """Returns the engine options of a command whose model may stand without a flag.

    Raises: RequestError as `engine_options`, and if two models are given.
    """
    if args.model is not None:
        if args.model_path is not None and args.model_path != args.model:
            raise RequestError(
                f"the model is given twice: {args.model} and --model-path {args.model_path}"
            )
        args.model_path = args.model
    return engine_options(args, needs_model=needs_model)


def add_sampling_options(
    parser: argparse.ArgumentParser, *, max_tokens: int | None, are_models: bool = False
) -> None:
    """Adds the flags of SamplingParams that fit a command line.

    Args:
      max_tokens: default; None: until the context is full.
      are_models: the other defaults are those of the model's generation_config.json; a flag that
        is not given is None then.
    """
    group = parser.add_argument_group("sampling")
    for name, kind, metavar, text in _SAMPLING:
        default = "the model's" if are_models else _DEFAULTS[name]
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=None if are_models else _DEFAULTS[name],
            metavar=metavar,
            help=f"{text} (default: {default})",
        )
    limit = "until the context is full" if max_tokens is None else max_tokens
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"tokens to generate at most (default: {limit})",
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument(
        "--stop-token-id",
        action="append",
        type=int,
        dest="stop_token_ids",
        metavar="ID",
        help="end after this token; may be repeated",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's own end tokens"
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of SamplingParams that the flags give."""
    # The flag --seed is the engine's; the command decides what it means for a request.
    names = _DEFAULTS.keys() - {"seed"}
    return {name: value for name, value in vars(args).items() if name in names}


def tokens(text: str) -> int:
    """Returns a number of tokens; `64k` means 65536.

    Raises: ArgumentTypeError if the text is no number.
    """
    match = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens like 4096 or 64k")
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


def switch(text: str) -> bool:
    """Returns what a word for on or off means.

    Raises: ArgumentTypeError if the text is none.
    """
    if text.lower() not in _SWITCHES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_SWITCHES)}")
    return _SWITCHES[text.lower()]


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _readers() -> dict[str, Callable[[str], Any]]:
    """Returns, by field of EngineConfig, what turns text into its value."""
    readers: dict[str, Callable[[str], Any]] = {}
    for name, hint in typing.get_type_hints(EngineConfig).items():
        kinds = set(typing.get_args(hint) or (hint,)) - {type(None)}
        known = {frozenset((int,)): int, frozenset((int, str)): _number_or_word}
        known[frozenset((bool,))] = switch
        readers[name] = tokens if name in _TOKENS else known.get(frozenset(kinds), str)
    return readers


def _number_or_word(text: str) -> int | str:
    return int(text) if re.fullmatch("-?[0-9]{1,12}", text) else text


def widths_of(text: str) -> tuple[int, ...]:
    """Returns the rows of a step that --width lists.

    Raises: ConfigError if it is no list of widths.
    """
    return numbers_of("--width", text, 1, 255)


def numbers_of(flag: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Returns the numbers that a flag lists, each once.

    Raises: ConfigError if it is no list of numbers in these bounds.
    """
    words = [word for word in text.split(",") if word]
    if not words or not all(word.isdigit() and least <= int(word) <= most for word in words):
        raise ConfigError(
            f"{flag} {text}: expected numbers from {least} to {most}, such as 1,16,32"
        )
    return tuple(dict.fromkeys(map(int, words)))


def algorithms_of(text: str) -> tuple[str, ...]:
    """Returns the algorithms that --algorithm lists, of those that are planned and measured.

    Raises: ConfigError for another name.
    """
    words = tuple(word.upper() for word in text.split(",") if word)
    for word in words:
        if word not in MEASURED_ALGORITHMS:
            raise ConfigError(
                f"--algorithm {text}: {word!r} is none of {', '.join(MEASURED_ALGORITHMS)}"
                f"{nearest(word, MEASURED_ALGORITHMS)}"
            )
    return words
