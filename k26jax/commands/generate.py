"""`k26jax generate`: one prompt in, streamed text out, speeds and draft trees on request."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k26jax.commands.chat import add_chat_options, chat_prompt, check_chat_options, show_events
from k26jax.commands.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from k26jax.commands.terminal import Startup, say, uses_color
from k26jax.commands.trees import draw_tree
from k26jax.config import AUTO, Algorithm, EngineConfig
from k26jax.engine.request import SamplingParams
from k26jax.errors import RequestError

if TYPE_CHECKING:
    from k26jax.engine.output import CompletionOutput, StreamChunk
    from k26jax.llm import LLM
    from k26jax.text.chat import ChatPrompt

MAX_TOKENS = 128
_SHOWN_PROMPT = 2000


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "generate",
        help="continue one prompt",
        description="Continues one prompt. The text goes to standard output, all else to standard "
        "error. The prompt is taken as it is, without a chat template, unless --chat is given.",
    )
    parser.add_argument("prompt", nargs="?", help="text; '-' or nothing: read standard input")
    parser.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="read the prompt from a UTF-8 file"
    )
    parser.add_argument(
        "--show-trees",
        action="store_true",
        help="draw each step's draft tree; full circles mark the accepted path",
    )
    parser.add_argument(
        "--compare-plain",
        action="store_true",
        help="decode the prompt plainly too, with the same weights; print both speeds and whether "
        "the tokens are the same; exit with 1 if they are not",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of the text"
    )
    add_chat_options(parser)
    add_sampling_options(parser, max_tokens=MAX_TOKENS)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if plain decoding was asked for and gave other tokens."""
    # Everything that can be wrong with the request is found before minutes go into loading.
    params = SamplingParams(**sampling_options(args))
    check_chat_options(args)
    config = EngineConfig(**engine_options(args))
    if args.compare_plain and config.algorithm is Algorithm.NONE:
        raise RequestError(
            "--compare-plain compares with a drafter; give --speculative-draft-model-path"
        )
    params = dataclasses.replace(params, seed=config.seed)
    # Whether this process takes the prompt may be known only once it has met the others.
    is_alone = config.coordinator_address is None
    text = _read_prompt(args) if is_alone else ""
    from k26jax.engine.loading import prepare
    from k26jax.llm import LLM

    prepared, chat = prepare(config), None
    if prepared.leads:
        text = text if is_alone else _read_prompt(args)
        chat = chat_prompt(args, prepared, text)
        prepared.request(chat.token_ids if chat else text, params)
    prompt = chat.token_ids if chat else text
    with (
        Startup() as startup,
        LLM.from_prepared(prepared, on_load=startup.on_load, on_compile=startup.on_compile) as llm,
    ):
        if not llm.leads:
            startup.ready("this process follows process 0")
            llm.follow()
            return 0
        if args.show_trees:
            startup.on_compile("traced_steps")
            llm.engine.runner.warm_up_traces()
        startup.ready(_describe(config))
        if sys.stderr.isatty():
            _show_prompt(chat.text if chat else text)
        output, steps = _stream(llm, prompt, params, args, chat)
        _report(output)
        prompt_tokens = len(llm.encode(prompt))
        record = output.record(prompt_tokens) | ({"steps": steps} if args.show_trees else {})
        same = True
        if args.compare_plain:
            same, record["compare_plain"] = _compare(llm, prompt, params, output)
        if args.json:
            print(json.dumps(record), flush=True)
    return 0 if same else 1


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt_file is not None and args.prompt is not None:
        raise RequestError("a prompt and --prompt-file are both given; give one")
    name = "the command line"
    try:
        if args.prompt_file is not None:
            name = str(args.prompt_file)
            return args.prompt_file.read_bytes().decode("utf-8-sig")
        if args.prompt not in (None, "-"):
            # Bytes that are no UTF-8 are here as lone surrogates.
            return os.fsencode(args.prompt).decode("utf-8")
        name = "standard input"
        if sys.stdin.isatty():
            say("reading the prompt from standard input; end it with Ctrl-D on a line of its own")
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeError as error:
        raise RequestError(f"the prompt from {name} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise RequestError(f"the prompt cannot be read from {name}: {error}") from error


def _show_prompt(text: str) -> None:
    say(text if len(text) <= _SHOWN_PROMPT else "..." + text[-_SHOWN_PROMPT:], end="")


def _describe(config: EngineConfig) -> str:
    if config.algorithm is Algorithm.DDTREE and config.speculative_ddtree_budget == AUTO:
        widths = ", ".join(map(str, config.ddtree_widths))
        return f"DDTREE, each step one of {widths} rows"
    if config.algorithm is Algorithm.DDTREE:
        return f"DDTREE, {config.speculative_ddtree_budget} nodes a tree"
    return "plain decoding" if config.algorithm is Algorithm.NONE else config.algorithm.value


def _stream(
    llm: LLM,
    prompt: str | list[int],
    params: SamplingParams,
    args: argparse.Namespace,
    chat: ChatPrompt | None = None,
) -> tuple[CompletionOutput, list[dict[str, Any]]]:
    """Returns the output and the drawn trees; shows the text as it comes, or after the trees."""
    show_text = not args.json
    draw = _tree_drawer(llm)
    answer = None if chat is None else llm.answer(chat, params)
    output, steps = None, []
    try:
        for step, chunk in enumerate(llm.stream(prompt, params, trace=args.show_trees)):
            if args.show_trees:
                if step == 0:
                    say()
                draw(step, chunk)
                steps += [dataclasses.asdict(trace) for trace in chunk.traces]
            events = answer.push(chunk.token_ids) if answer else []
            if show_text and not args.show_trees:
                show_events(events) if answer else print(chunk.text, end="", flush=True)
            output = chunk.output or output
    except KeyboardInterrupt:
        say()
        raise
    assert output is not None
    if answer is not None:
        output = dataclasses.replace(output, message=answer.message)
    if args.show_trees and show_text:
        say()
        print((output.message.content or "") if output.message else output.text, end="")
    if show_text:
        print(flush=True)
    return output, steps


def _tree_drawer(llm: LLM) -> Callable[[int, StreamChunk], None]:
    tokenizer = llm.engine.loaded.tokenizer
    color, width = uses_color(), shutil.get_terminal_size((100, 24)).columns

    def text_of(*tokens: int) -> str:
        if tokenizer is None:
            return " ".join(map(str, tokens))
        return repr(tokenizer.decode(tokens, skip_special_tokens=False))

    def draw(step: int, chunk: StreamChunk) -> None:
        if step == 0:
            say(f"prefill: {text_of(*chunk.token_ids)}")
        for trace in chunk.traces:
            say(
                f"\nstep {step}: {len(trace.path) - 1} of {len(trace.token_ids) - 1} drafted nodes "
                f"accepted, emits {text_of(*chunk.token_ids)}"
            )
            say(draw_tree(trace, text_of, width=width - 1, color=color))

    return draw


def _report(output: CompletionOutput) -> None:
    metrics = output.metrics
    lengths = metrics.accept_lengths
    say(
        f"\n{metrics.generated_tokens} tokens ({output.finish_reason}), "
        f"{metrics.tokens_per_second:.1f} tokens per second as shown, prefill "
        f"{metrics.ttft_seconds:.3f} s"
    )
    if lengths:
        say(
            f"{metrics.accept_length:.2f} tokens per target forward ({metrics.target_forwards} "
            f"forwards), accept length {sum(lengths) / len(lengths):.2f}"
        )
    if metrics.rows:
        counts = ", ".join(f"{count} of {rows}" for rows, count in sorted(metrics.rows.items()))
        say(f"steps by rows: {counts}")


def _compare(
    llm: LLM, prompt: str | list[int], params: SamplingParams, shown: CompletionOutput
) -> tuple[bool, dict[str, Any]]:
    """Returns whether plain decoding gives the same tokens, and both speeds.

    Both run without streaming and without trees, each after a short run to warm up.
    """
    with Startup() as startup:
        plain = llm.without_drafter(startup.on_compile)
        startup.ready("plain decoding")
    runs = []
    for engine in (llm, plain):
        engine.generate(prompt, dataclasses.replace(params, max_tokens=2), raise_on_error=True)
        runs.append(engine.generate(prompt, params, raise_on_error=True)[0].outputs[0])
    plain.shutdown()
    drafted, alone = (run.metrics.tokens_per_second for run in runs)
    for name, run in zip((_describe(llm.config), "plain decoding"), runs, strict=True):
        say(
            f"{name}: {run.metrics.tokens_per_second:.1f} tokens per second, "
            f"{run.metrics.target_forwards} target forwards"
        )
    if alone:
        say(f"speed over plain decoding: {drafted / alone:.2f} times")
    same = all(run.token_ids == shown.token_ids for run in runs)
    say(f"same tokens: {'yes' if same else 'no'}")
    return same, {
        "same_tokens": same,
        "plain_token_ids": runs[1].token_ids,
        "tokens_per_second": drafted,
        "plain_tokens_per_second": alone,
    }
