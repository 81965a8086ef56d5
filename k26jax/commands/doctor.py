"""`k26jax doctor`: whether this machine, and a model on it, would start, and what to do if not."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from k26jax.commands.options import add_engine_options, served_options
from k26jax.commands.serve import HOST, PORT
from k26jax.commands.terminal import say
from k26jax.errors import RequestError


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, and a model folder on it, before a start",
        description="Checks versions, devices, memory, the compile cache and the port, and for a "
        "model its files, tokenizer, chat template, drafter and memory with the options given. "
        "Reads no weights. Each line is ok, warn or fail; those two say what to do. Exits with 0 "
        "unless one is fail, else as the start would.",
    )
    parser.add_argument("model", nargs="?", help="model folder, the same as --model-path")
    parser.add_argument("--host", default=HOST, help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=PORT, help="port to listen on (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser, max_running_requests=4, enable_prefix_caching=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or the code of the first check that failed."""
    if not 0 <= args.port < 1 << 16:
        raise RequestError(f"--port {args.port}, expected 0 to 65535")
    options = served_options(args, needs_model=False)
    from k26jax.commands.doctor_checks import FAIL, WARN, checks

    found = []
    for check in checks(options, args.host, args.port):
        found.append(check)
        if args.json:
            continue
        print(f"{check.status:4}  {check.name:14} {check.text}", flush=True)
        if check.fix:
            print(f"{'':21}-> {check.fix}", flush=True)
    failed = [check for check in found if check.status == FAIL]
    warned = sum(check.status == WARN for check in found)
    if args.json:
        rows = [dataclasses.asdict(check) for check in found]
        print(json.dumps({"ok": not failed, "checks": rows}))
    else:
        say(f"{len(found)} checks: {len(failed)} failed, {warned} warnings")
    return failed[0].exit_code if failed else 0
