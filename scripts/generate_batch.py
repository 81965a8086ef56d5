"""Continues every prompt of a JSONL file; run it again to go on where it was cut.

A line of the input holds custom_id, prompt (text) or prompt_token_ids, and any sampling parameter
(temperature, max_tokens, seed, stop, ...) that differs from its flag. A line of the output holds
custom_id, text, token_ids, finish_reason, usage, metrics and error. Lines that the output answers
are skipped, those with an error are tried again. Exits with 1 if any line failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from k26jax.batch import resume, run_files
from k26jax.cli import Parser, run_command
from k26jax.commands.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from k26jax.commands.terminal import Startup, say
from k26jax.engine.request import SamplingParams
from k26jax.errors import RequestError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    add_sampling_options(parser, max_tokens=None)
    add_engine_options(parser)
    parser.set_defaults(run=run)
    return run_command(parser, argv)


def run(args: argparse.Namespace) -> int:
    """Returns 0 if every line was answered, 1 if any failed."""
    options, defaults = engine_options(args), sampling_options(args)
    SamplingParams(**defaults)
    if not args.input.is_file():
        raise RequestError(f"--input {args.input} is not a file")
    if args.output.exists() and os.path.samefile(args.input, args.output):
        raise RequestError(f"{args.input} is both --input and --output; give another output")
    done = resume(args.output)
    from k26jax.llm import LLM

    startup = Startup()
    with LLM(**options, on_load=startup.on_load, on_compile=startup.on_compile) as llm:
        startup.ready(llm.config.algorithm.value)
        summary = run_files(llm, args.input, args.output, done=done, defaults=defaults)
    say(
        f"{summary.succeeded} answered, {summary.skipped} skipped, {summary.failed} failed; "
        f"{summary.tokens} tokens, {summary.tokens_per_second:.1f} per second, "
        f"accept length {summary.accept_length:.2f}"
    )
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
