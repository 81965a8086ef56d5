"""The command line: one command per verb. Loads JAX only once a command runs."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from k26jax import __version__
from k26jax.errors import K26Error, nearest

COMMANDS = ("generate", "inspect")
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest flag for an unknown one and exits with 2."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Prints usage and the message, and exits with code 2."""
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            flags = [flag for action in self._all_actions() for flag in action.option_strings]
            message += nearest(unknown[1].split("=")[0], flags)
        super().error(message)

    def _all_actions(self) -> list[argparse.Action]:
        actions = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                actions += [a for sub in action.choices.values() for a in sub._actions]
        return actions


def build_parser() -> Parser:
    """Returns the parser of all commands."""
    parser = Parser(prog="k26jax", description="Kimi K2.6 and its relatives in JAX.")
    parser.add_argument("--version", action="version", version=f"k26jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"k26jax.commands.{name}").add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 ok, 1 failed, 2 usage, 3 checkpoint invalid, 4 does not fit,
    130 interrupted."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except K26Error as error:
        print(f"k26jax: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("k26jax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
