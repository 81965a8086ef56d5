"""`k26jax batch`: a file of requests in OpenAI's batch format in, a file of answers out."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from k26jax.commands.options import (
    add_engine_options,
    add_sampling_options,
    sampling_options,
    served_options,
)
from k26jax.commands.serve import generation_defaults, require_packages
from k26jax.commands.terminal import Startup, say
from k26jax.config import EngineConfig
from k26jax.engine.request import SamplingParams
from k26jax.errors import RequestError

SLOTS = 4
INTERRUPTED = 130


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests; run it again to go on where it was cut",
        description="Answers every line of a JSONL file as the server would. A line has custom_id, "
        "method (POST), url (/v1/chat/completions or /v1/completions) and body, or the body's "
        "fields beside custom_id. Lines that the output answers are skipped, failed ones are tried "
        "again. Ctrl-C finishes the lines under way, a second one ends them. Exits with 1 if any "
        "line failed.",
    )
    parser.add_argument("model", nargs="?", help="model folder, the same as --model-path")
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help="requests")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="answers")
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="model that bodies may name; may be repeated (default: the folder's name)",
    )
    add_sampling_options(parser, max_tokens=None, are_models=True)
    add_engine_options(parser, max_running_requests=SLOTS, enable_prefix_caching=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0 if every line was answered, 1 if any failed, 130 if not all were read."""
    # Everything that can be wrong with the files is found before minutes go into loading.
    require_packages("a batch")
    config = EngineConfig(**served_options(args))
    given = {name: value for name, value in sampling_options(args).items() if value is not None}
    params = SamplingParams(**given)
    if config.coordinator_address is None:
        _check_files(args.input, args.output)
    from k26jax.batch import run_files, settings_for
    from k26jax.batch_files import resume
    from k26jax.engine.loading import prepare
    from k26jax.llm import LLM
    from k26jax.server import logs
    from k26jax.server.service import Service

    folder = Path(config.model_path)
    names = tuple(args.served_model_name or [folder.resolve().name])
    defaults = generation_defaults(folder) | given
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
        logs.set_up("text", "error")
        service = Service(settings_for(names, llm.engine.runner.slots, defaults))
        service.open(llm)
        try:
            summary = run_files(service, args.input, args.output, done=done)
        finally:
            service.drain(0)
    say(
        f"{summary.succeeded} answered, {summary.skipped} skipped, {summary.failed} failed; "
        f"{summary.tokens} tokens, {summary.tokens_per_second:.1f} per second, "
        f"accept length {summary.accept_length:.2f}"
    )
    if summary.was_interrupted:
        say("not all lines were read; the same command goes on")
        return INTERRUPTED
    return 1 if summary.failed else 0


def _check_files(source: Path, target: Path) -> None:
    """Raises RequestError unless one can be read and the other be written."""
    from k26jax.batch_files import require_writable

    if not source.is_file():
        raise RequestError(f"--input {source} is not a file")
    try:
        source.open("rb").close()
    except OSError as error:
        raise RequestError(f"--input {source} cannot be read ({error.strerror})") from error
    if target.exists() and os.path.samefile(source, target):
        raise RequestError(f"{source} is both --input and --output; give another output")
    require_writable(target)
