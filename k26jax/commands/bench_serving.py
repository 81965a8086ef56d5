"""`k26jax bench serving`: how fast an OpenAI-compatible server answers, this one or another."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from k26jax.commands.terminal import say
from k26jax.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from k26jax.bench.serving import Outcome, Run, Traffic

_COUNT = 32


def add(things: Any) -> argparse.ArgumentParser:
    """Adds the parser of this kind of measurement."""
    parser = things.add_parser(
        "serving",
        help="how fast a server answers",
        description="Asks a running server, this one's or any other with OpenAI's routes, and "
        "prints times to the first token, between tokens and to the end, throughput and accept "
        "length, under the labels of other engines' benchmarks. Closed loop: --max-concurrency "
        "requests are always under way. Open loop: --request-rate requests a second begin in "
        "random gaps, whatever the server does. Exits with 1 if a request failed.",
    )
    add = parser.add_argument
    add(
        "--base-url", default="http://127.0.0.1:30000", metavar="URL", help="(default: %(default)s)"
    )
    add("--model", metavar="NAME", help="(default: the first that is served)")
    add("--api-key", metavar="KEY", help="key to send")
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="(default: %(default)s)",
    )
    add("--num-prompts", type=int, metavar="N", help=f"requests (default: {_COUNT}, or the file's)")
    add(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="requests under way at most (default: 1, without a limit if --request-rate is given)",
    )
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="requests a second; inf: as --max-concurrency lets them (default: %(default)s)",
    )
    add("--prompt-file", type=Path, metavar="FILE", help="JSON lines with prompt or messages")
    add("--random-input-len", type=int, default=256, metavar="N", help="words, or tokens with "
        "--vocab-size (default: %(default)s)")  # fmt: skip
    add("--random-output-len", "--max-tokens", type=int, default=128, metavar="N", help="tokens "
        "of an answer at most (default: %(default)s)")  # fmt: skip
    add("--random-range-ratio", type=float, default=1.0, metavar="R", help="draw both lengths from "
        "R times as much up to the whole (default: %(default)s)")  # fmt: skip
    add("--vocab-size", type=int, metavar="N", help="prompts are random token ids below N")
    add("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    add("--ignore-eos", action="store_true", help="send ignore_eos, which not every server knows")
    add("--extra-body", default="{}", metavar="JSON", help="further fields of every request")
    add("--warmup-requests", type=int, default=1, metavar="N", help="first ones, not counted "
        "(default: %(default)s)")  # fmt: skip
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds without a byte after "
        "which a request has failed (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=1, help="of prompts and gaps (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures and every request as JSON too")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if a request failed.

    Raises: RequestError for what cannot be asked, NotServingError if nobody answers.
    """
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError("bench serving needs httpx; install with: pip install 'k26jax[bench]'")
    traffic = _traffic(args)
    from k26jax.bench.serving_report import figures, report

    run, model = asyncio.run(_measure(args, traffic))
    found = figures(run)
    asked = {
        "backend": "openai-chat" if args.endpoint == "chat" else "openai",
        "base_url": args.base_url,
        "model": model,
        "request_rate": str(args.request_rate),
        "max_concurrency": traffic.max_concurrency,
        "num_prompts": len(traffic.bodies),
        "seed": args.seed,
    }
    print(report(found, asked), flush=True)
    if args.json:
        requests = [vars(outcome) for outcome in run.outcomes]
        args.json.write_text(json.dumps(asked | found | {"requests": requests}, indent=1) + "\n")
    return 1 if found["failed"] else 0


def _traffic(args: argparse.Namespace) -> Traffic:
    """Returns what the flags ask for."""
    from k26jax.bench.serving import Traffic
    from k26jax.bench.serving_prompts import Lengths, file_bodies, random_bodies

    for flag, value, least in (
        ("--num-prompts", args.num_prompts, 1),
        ("--max-concurrency", args.max_concurrency, 1),
        ("--warmup-requests", args.warmup_requests, 0),
    ):
        if value is not None and value < least:
            raise RequestError(f"{flag} {value}, expected at least {least}")
    if not args.request_rate > 0 or not args.timeout > 0:
        raise RequestError("--request-rate and --timeout: expected more than 0")
    shared = {"temperature": args.temperature, **_extra_body(args.extra_body)}
    if args.ignore_eos:
        shared["ignore_eos"] = True
    if args.prompt_file is not None:
        limit = args.random_output_len
        bodies = file_bodies(args.endpoint, args.num_prompts, args.prompt_file, limit)
    else:
        lengths = Lengths(
            args.random_input_len, args.random_output_len, args.random_range_ratio, args.vocab_size
        )
        bodies = random_bodies(args.endpoint, args.num_prompts or _COUNT, lengths, args.seed)
    limit = args.max_concurrency
    if limit is None and args.request_rate == float("inf"):
        limit = 1
    return Traffic(
        args.base_url.rstrip("/").removesuffix("/v1"),
        args.endpoint,
        [body | shared for body in bodies],
        max_concurrency=limit,
        request_rate=args.request_rate,
        seed=args.seed,
        timeout=args.timeout,
        api_key=args.api_key,
    )


def _extra_body(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RequestError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(f"--extra-body {text!r:.80}, expected a JSON object")
    return data


async def _measure(args: argparse.Namespace, traffic: Traffic) -> tuple[Run, str]:
    """Returns how it went, and the model that was asked; failures are named as they come."""
    from k26jax.bench.serving import Client, Outcome

    async with Client(traffic) as client:
        model = await client.find_model(args.model)
        for body in traffic.bodies:
            body["model"] = model
        for place in range(args.warmup_requests):
            outcome = Outcome()
            await client.ask(traffic.bodies[place % len(traffic.bodies)], outcome)
            if outcome.error is not None:
                raise RequestError(
                    f"the first request failed, so none is measured: {outcome.error}"
                )
        with tqdm(total=len(traffic.bodies), unit="request", disable=None) as bar:

            def on_done(outcome: Outcome) -> None:
                bar.update()
                if outcome.error is not None:
                    tqdm.write(f"a request failed: {outcome.error}", file=sys.stderr)

            say(f"asking {model} at {traffic.base_url}")
            return await client.run(on_done), model
