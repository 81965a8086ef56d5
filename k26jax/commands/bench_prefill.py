"""`k26jax bench prefill`: chunks of a prompt on one rank of a mesh, as text and JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from k26jax.bench.published import published
from k26jax.commands.bench_rank import add_rank, check_rank
from k26jax.commands.options import numbers_of
from k26jax.commands.terminal import say
from k26jax.errors import KernelError


def add(things: Any) -> argparse.ArgumentParser:
    """Adds the parser of this kind of measurement."""
    parser = things.add_parser(
        "prefill",
        help="chunks of a prompt on one rank of a mesh, on one GPU",
        description="Holds on one GPU the arrays of one of tp-size x ep-size ranks, with random "
        "weights and caches, and runs the prefill program that the rank runs: for each chunk size "
        "and context the time, tokens a second, and the operations against the rate at which XLA "
        "multiplies matrices, measured in the same run.",
    )
    add_rank(parser)
    parser.add_argument(
        "--chunk", default="256,2048", help="tokens of a chunk (default: %(default)s)"
    )
    parser.add_argument(
        "--context",
        default="4096,32768,131072",
        help="tokens in the cache before it (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON too")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns 0 once everything was measured.

    Raises: KernelError without a GPU; ConfigError, MeshError or CapacityError for what cannot be
      measured.
    """
    import jax
    import jax.numpy as jnp

    from k26jax.bench.prefill import PrefillJob, PrefillRow, lines, measure
    from k26jax.bench.timing import operations_a_second
    from k26jax.engine.loading import settle_kernels
    from k26jax.pallas.gpu import architecture

    check_rank(args)
    model, draft = published(args.config, args.layers)
    job = PrefillJob(
        model=model,
        draft=draft,
        tp_size=args.tp_size,
        ep_size=args.ep_size,
        chunks=numbers_of("--chunk", args.chunk, 1, 1 << 16),
        contexts=numbers_of("--context", args.context, 0, model.max_position_embeddings),
        kernels=settle_kernels(args.kernels, model, jnp.dtype("bfloat16")),
    )
    if architecture() is None:
        raise KernelError("bench prefill needs a GPU: a CPU says nothing about time")
    device = jax.devices()[0].device_kind
    rate = operations_a_second()
    say(f"{device}, JAX {jax.__version__}; XLA multiplies matrices at {rate / 1e12:.0f} TFLOP/s")
    record = {"device": device, "jax": jax.__version__, "operations_a_second": rate}
    record |= {"config": args.config, "tp_size": args.tp_size, "ep_size": args.ep_size}
    rows: list[PrefillRow] = []
    for row in measure(job):
        rows.append(row)
        print(*lines([row], rate), flush=True)
        if args.json:
            figures = [vars(item) for item in rows]
            args.json.write_text(json.dumps(record | {"rows": figures}, indent=1) + "\n")
    return 0
