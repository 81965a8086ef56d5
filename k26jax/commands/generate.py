"""`k26jax generate`: one prompt in, streamed text out, speeds and draft trees on request."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k26jax.commands.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from k26jax.commands.trees import draw_tree
from k26jax.errors import RequestError

if TYPE_CHECKING:
    from k26jax.engine.output import CompletionOutput
    from k26jax.llm import LLM


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser("generate", help="continue one prompt", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="text; '-' or nothing: read standard input")
    parser.add_argument("--prompt-file", type=Path, help="read the prompt from a file")
    parser.add_argument(
        "--show-trees", action="store_true", help="draw each step's draft tree and accepted path"
    )
    parser.add_argument(
        "--compare-plain",
        action="store_true",
        help="decode plainly too; print both speeds and whether the tokens are the same",
    )
    add_sampling_options(parser, max_tokens=128)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if plain decoding was asked for and gave other tokens."""
    prompt = _prompt(args)
    options = {"max_running_requests": 1} | engine_options(args)
    drafted = _decode(prompt, args, options, show=True)
    if not args.compare_plain:
        return 0
    _say("")
    plain = _decode(prompt, args, options | {"speculative_algorithm": "NONE"}, show=False)
    same = plain.token_ids == drafted.token_ids
    if plain.metrics.tokens_per_second:
        ratio = drafted.metrics.tokens_per_second / plain.metrics.tokens_per_second
        _say(f"speed over plain decoding: {ratio:.2f} times")
    _say(f"same tokens as plain decoding: {'yes' if same else 'no'}")
    return 0 if same else 1


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt_file is not None:
        if args.prompt is not None:
            raise RequestError("a prompt and --prompt-file are both given; give one")
        try:
            return args.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--prompt-file {args.prompt_file}: {error}") from error
    if args.prompt in (None, "-"):
        return sys.stdin.read()
    return args.prompt


def _decode(
    prompt: str, args: argparse.Namespace, options: dict[str, Any], *, show: bool
) -> CompletionOutput:
    from k26jax.engine.request import SamplingParams
    from k26jax.llm import LLM

    # Checked before minutes are spent on loading.
    params = SamplingParams(**sampling_options(args))
    with _load(LLM, options) as llm:
        algorithm = llm.config.algorithm.value
        if show:
            print(prompt, end="", flush=True)
        chunks = llm.stream(prompt, params, trace=show and args.show_trees)
        output = None
        for step, chunk in enumerate(chunks):
            if show:
                print(chunk.text, end="", flush=True)
            for trace in chunk.traces:
                _say("")
                _say(f"step {step}: {len(trace.path)} of {len(trace.token_ids)} nodes accepted")
                _say(draw_tree(trace, lambda token: _token_text(llm, token), _is_tty()))
            output = chunk.output or output
        if show:
            print(flush=True)
    assert output is not None
    _report(algorithm, output)
    return output


def _load(make: type[LLM], options: dict[str, Any]) -> LLM:
    begun = time.perf_counter()
    seen: dict[str, float] = {}

    def on_load(what: str, done: int, total: int) -> None:
        if done >= total and what not in seen:
            seen[what] = time.perf_counter()
            _say(f"{what}: {total / 1e6:.1f} MB read, {seen[what] - begun:.1f} s")

    def on_compile(name: str) -> None:
        _say(f"compiling {name} ({time.perf_counter() - begun:.1f} s)")

    options = dict(options)
    llm = make(options.pop("model_path"), on_load=on_load, on_compile=on_compile, **options)
    _say(f"ready after {time.perf_counter() - begun:.1f} s: {llm.config.algorithm.value}")
    return llm


def _report(algorithm: str, output: CompletionOutput) -> None:
    metrics = output.metrics
    _say(
        f"{algorithm}: {metrics.generated_tokens} tokens ({output.finish_reason}), "
        f"{metrics.tokens_per_second:.1f} tokens per second, "
        f"{metrics.accept_length:.2f} tokens per target forward "
        f"({metrics.target_forwards} forwards), first token after {metrics.ttft_seconds:.3f} s"
    )


def _token_text(llm: LLM, token: int) -> str:
    tokenizer = llm.engine.loaded.tokenizer
    if tokenizer is None:
        return str(token)
    return repr(tokenizer.token_bytes(token).decode("utf-8", "replace"))


def _is_tty() -> bool:
    return sys.stderr.isatty()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
