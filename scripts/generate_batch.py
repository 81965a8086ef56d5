"""Continues every prompt of a JSONL file; run it again to go on where it was cut.

A line of the input holds custom_id, prompt (text), prompt_token_ids or messages (with tools and
chat_template_kwargs), and any sampling parameter (temperature, max_tokens, seed, stop, ...) that
differs from its flag. A line of the output holds custom_id, text, token_ids, finish_reason, usage,
metrics, error and, for messages, message. Lines that the output answers
are skipped, those with an error are tried again. Exits with 1 if any line failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from k26jax.batch import require_writable, resume, run_files
from k26jax.cli import Parser, run_command
from k26jax.commands.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from k26jax.commands.terminal import Startup, say
from k26jax.config import EngineConfig
from k26jax.engine.request import SamplingParams
from k26jax.errors import RequestError

SLOTS = 4


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    add_sampling_options(parser, max_tokens=None)
    add_engine_options(parser, max_running_requests=SLOTS)
    parser.set_defaults(run=run)
    return run_command(parser, argv)


def run(args: argparse.Namespace) -> int:
    """Returns 0 if every line was answered, 1 if any failed."""
    # Everything that can be wrong with the files is found before minutes go into loading.
    config, defaults = EngineConfig(**engine_options(args)), sampling_options(args)
    params = SamplingParams(**defaults)
    if config.coordinator_address is None:
        _check_files(args.input, args.output)
    from k26jax.engine.loading import prepare
    from k26jax.llm import LLM

    prepared = prepare(config)
    prepared.request([0], params)
    if prepared.leads and config.coordinator_address is not None:
        _check_files(args.input, args.output)
    done = resume(args.output) if prepared.leads else set()
    with (
        Startup() as startup,
        LLM.from_prepared(prepared, on_load=startup.on_load, on_compile=startup.on_compile) as llm,
    ):
        startup.ready(llm.config.algorithm.value)
        if not llm.leads:
            llm.follow()
            return 0
        summary = run_files(llm, args.input, args.output, done=done, defaults=defaults)
    say(
        f"{summary.succeeded} answered, {summary.skipped} skipped, {summary.failed} failed; "
        f"{summary.tokens} tokens, {summary.tokens_per_second:.1f} per second, "
        f"accept length {summary.accept_length:.2f}"
    )
    return 1 if summary.failed else 0


def _check_files(source: Path, target: Path) -> None:
    if not source.is_file():
        raise RequestError(f"--input {source} is not a file")
    try:
        source.open("rb").close()
    except OSError as error:
        raise RequestError(f"--input {source} cannot be read ({error.strerror})") from error
    if target.exists() and os.path.samefile(source, target):
        raise RequestError(f"{source} is both --input and --output; give another output")
    require_writable(target)


if __name__ == "__main__":
    sys.exit(main())
