"""The command line: one command per verb. Loads JAX only once a command runs."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from k26jax import __version__
from k26jax.errors import CapacityError, K26Error, nearest

COMMANDS = ("generate", "serve", "batch", "convert", "verify", "inspect", "bench", "plan", "doctor")
FAILED, USAGE, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """A parser that takes whole flags only and names the nearest one for an unknown one."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns the parsed arguments; what is unknown ends the program here.

        A command's own parser is asked first, so its flags are the ones suggested.
        """
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Prints usage and the message, and exits with code 2."""
        unknown = re.match(r"unrecognized arguments: .*?(-[^\s=]+)", message)
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            message += nearest(unknown[1], flags)
        elif choice:
            message += nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        super().error(message)


def build_parser() -> Parser:
    """Returns the parser of all commands."""
    parser = Parser(prog="k26jax", description="Kimi K2.6 and its relatives in JAX.")
    parser.add_argument("--version", action="version", version=f"k26jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"k26jax.commands.{name}").add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of one command; see `run_command`."""
    return run_command(build_parser(), argv)


def run_command(parser: Parser, argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of a parser's `run`.

    0 ok, 1 failed, 2 usage, 3 checkpoint or configuration invalid, 4 does not fit,
    130 interrupted.
    """
    try:
        args = parser.parse_args(argv)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else USAGE
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: _say(parser, f"warning: {message}")
            code = args.run(args)
        sys.stdout.flush()
        return code
    except K26Error as error:
        return _report(parser, error, error.exit_code)
    except KeyboardInterrupt:
        return _report(parser, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Python flushes stdout once more at its end; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _report(parser, error, FAILED)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        hint = "out of memory; lower --context-length or --max-running-requests"
        return _report(parser, f"{hint} ({str(error).splitlines()[:1]})", CapacityError.exit_code)


def _report(parser: Parser, what: object, code: int) -> int:
    _say(parser, what)
    return code


def _say(parser: Parser, what: object) -> None:
    print(f"{parser.prog}: {what}", file=sys.stderr, flush=True)
