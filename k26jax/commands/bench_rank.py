"""`k26jax bench rank`: the steps of one rank of a mesh on one GPU, as text, JSON and a picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k26jax.bench.published import MODELS, has_published_drafter, published
from k26jax.commands.options import algorithms_of, widths_of
from k26jax.commands.terminal import new_figure, say
from k26jax.errors import ConfigError, KernelError

if TYPE_CHECKING:
    from k26jax.bench.rank import Job, Row


def add(things: Any) -> argparse.ArgumentParser:
    """Adds the parser of this kind of measurement."""
    parser = things.add_parser(
        "rank",
        help="the steps of one rank of a mesh, on one GPU",
        description="Holds on one GPU the arrays of one of tp-size x ep-size ranks, with random "
        "weights and caches, and runs the programs that the rank runs; sums over ranks are its "
        "own part. For each width: the step as the engine runs it and its five stages, their "
        "time, kernels, bytes, the time in which a plain kernel reads as many, and the ratio; the "
        "distinct experts that the random router chose; the host's share. Width 1 is plain "
        "decoding (NONE), others are trees (DDTREE).",
    )
    add_rank(parser)
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens in the cache (default: %(default)s)"
    )
    parser.add_argument(
        "--width", default="1,2,4,8,16,32,64", help="rows of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--algorithm", default="NONE,DDTREE", help="NONE, DDTREE or both (default: %(default)s)"
    )
    parser.add_argument(
        "--check-tokens",
        type=int,
        default=0,
        metavar="N",
        help="compare N greedy tokens of every tree width with plain decoding's",
    )
    parser.set_defaults(run=run)
    return parser


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name a model and one of its ranks."""
    parser.add_argument(
        "--config", default=MODELS[0], choices=MODELS, help="published model (default: %(default)s)"
    )
    parser.add_argument("--tp-size", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--ep-size", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, help="of the target; fewer than it has")
    parser.add_argument(
        "--kernels", choices=("auto", "pallas", "reference"), default="auto", help="as in generate"
    )


def check_rank(args: argparse.Namespace) -> None:
    """Raises ConfigError for a mesh that is none."""
    for name in ("tp_size", "ep_size"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(args, name)}: expected 1 or more")


def run(args: argparse.Namespace) -> int:
    """Returns 0 once everything was measured; 1 if tokens differed.

    Raises: KernelError without a GPU; ConfigError, MeshError or CapacityError for what cannot be
      measured.
    """
    import jax

    from k26jax.bench.rank import TokensRow, measure
    from k26jax.bench.timing import read_bytes_a_second
    from k26jax.pallas.gpu import architecture

    job = job_of(args)
    job.turns()
    if architecture() is None:
        raise KernelError("bench rank needs a GPU: interpreted kernels say nothing about time")
    if args.plot:
        new_figure((1, 1))  # what is missing is said before the measurement
    device = jax.devices()[0].device_kind
    rate = read_bytes_a_second()
    say(f"{device}, JAX {jax.__version__}; a plain kernel reads {rate / 1e12:.2f} TB/s")
    say(about(args.config, job))
    record = {"device": device, "jax": jax.__version__, "read_bytes_a_second": rate}
    record |= {"config": args.config, "layers": job.model.num_hidden_layers}
    for name in ("tp_size", "ep_size", "context", "kernels"):
        record[name] = getattr(job, name)
    rows: list[Row] = []
    for row in measure(job):
        rows.append(row)
        print("\n".join(lines(row, rows, rate)), flush=True)
        if args.json:
            # As it grows: a machine may be taken away before the end.
            figures = [_figures(item, rate) for item in rows]
            args.json.write_text(json.dumps(record | {"rows": figures}, indent=1) + "\n")
    if args.plot:
        draw(rows, rate, args.plot, title=f"{device}, {about(args.config, job)}")
    return int(any(isinstance(row, TokensRow) and row.equal < row.tokens for row in rows))


def job_of(args: argparse.Namespace) -> Job:
    """Returns what the flags ask to measure.

    Raises: ConfigError for a flag that says nothing measurable.
    """
    import jax.numpy as jnp

    from k26jax.bench.rank import Job
    from k26jax.engine.loading import settle_kernels

    check_rank(args)
    if args.context < 1:
        raise ConfigError(f"--context {args.context}: expected 1 or more")
    model, draft = published(args.config, args.layers)
    if args.context >= model.max_position_embeddings:
        raise ConfigError(
            f"--context {args.context}: {args.config} has {model.max_position_embeddings} positions"
        )
    return Job(
        model=model,
        draft=draft,
        tp_size=args.tp_size,
        ep_size=args.ep_size,
        context=args.context,
        widths=widths_of(args.width),
        algorithms=algorithms_of(args.algorithm),
        kernels=settle_kernels(args.kernels, model, jnp.dtype("bfloat16")),
        check_tokens=args.check_tokens,
    )


def about(config: str, job: Job) -> str:
    """Returns what is measured, and where it is not the published thing."""
    whole = published(config)[0].num_hidden_layers
    layers = job.model.num_hidden_layers
    parts = [
        f"{config}, {layers} of {whole} layers",
        f"one rank of TP-{job.tp_size}" + (f" x EP-{job.ep_size}" if job.ep_size > 1 else ""),
        f"context {job.context}",
        f"kernels {job.kernels}",
        "random weights, " + _experts(job),
    ]
    if not has_published_drafter(config):
        parts.append("a drafter of the published Kimi one's form")
    return ", ".join(parts)


def _experts(job: Job) -> str:
    from k26jax.config import Quantization

    stored = job.model.quantization
    if stored is Quantization.INT4_EXPERTS:
        return "INT4 experts"
    was = " (published in FP8)" if stored is Quantization.FP8_BLOCKS else ""
    return f"experts in bfloat16 as the engine loads them{was}"


def lines(row: Row, rows: Sequence[Row], rate: float) -> list[str]:
    """Returns one row as text, and what follows from it and the rows before it."""
    from k26jax.bench.rank import StepRow, TokensRow, share_of_small_stages

    name = f"{row.algorithm:6} T={row.width:<3}"
    if isinstance(row, TokensRow):
        return [f"{name} {row.equal} of {row.tokens} greedy tokens are plain decoding's"]
    floor = row.floor_seconds(rate)
    found = [
        f"{name} {row.stage:10} {row.seconds * 1e6:9.1f} us, {row.kernels:5} kernels, "
        f"{row.n_bytes / 1e9:8.4f} GB, floor {floor * 1e6:8.1f} us, ratio {row.seconds / floor:.2f}"
    ]
    if isinstance(row, StepRow):
        found.append(
            f"{name} {row.touched:.1f} distinct experts a layer ({row.independent:.1f} if rows "
            f"chose independently), {row.different_tokens:.1f} different tokens in a tree, "
            f"{row.layer_kernels:.1f} kernels an MoE layer, the host {row.host_share:.1%} of the "
            f"step, {row.accept_length:.2f} tokens a step"
        )
    same = [item for item in rows if (item.algorithm, item.width) == (row.algorithm, row.width)]
    if row.stage == "tree_build":
        step = next(item.seconds for item in same if isinstance(item, StepRow))
        found.append(
            f"{name} tree_build is {row.seconds / step:.2%} of the step; the published heap "
            f"builder on the host takes {row.heap_seconds * 1e6:.1f} us "
            f"({row.heap_seconds / step:.2%}), and the way there and back"
        )
    share = share_of_small_stages(same) if row.stage == "compact" else None
    if share is not None:
        found.append(f"{name} draft, tree_build, accept and compact: {share:.1%} of the step")
    return found


def draw(rows: Sequence[Row], rate: float, path: Path, *, title: str) -> None:
    """Writes a picture: the stages of each width one on the other, the step, and the floor.

    Raises: KernelError if matplotlib is not installed.
    """
    from k26jax.bench.launches import STAGES
    from k26jax.bench.rank import StageRow, StepRow

    figure = new_figure((9, 5))
    axes = figure.subplots()
    steps = sorted((row for row in rows if isinstance(row, StepRow)), key=lambda row: row.width)
    stages = {(row.width, row.stage): row for row in rows if isinstance(row, StageRow)}
    names = [str(row.width) for row in steps]
    bottom = [0.0] * len(steps)
    for stage in STAGES:
        found = [stages.get((step.width, stage)) for step in steps]
        heights = [row.seconds * 1e3 if row else 0.0 for row in found]
        axes.bar(names, heights, bottom=bottom, label=stage)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    floors = [row.floor_seconds(rate) * 1e3 for row in steps]
    axes.plot(names, [row.seconds * 1e3 for row in steps], "ko-", label="step")
    axes.plot(names, floors, "k--", label="its bytes, plainly read")
    axes.set_xlabel("rows of a step")
    axes.set_ylabel("ms")
    axes.set_title(title, fontsize=8, wrap=True)
    axes.legend()
    figure.savefig(path, format="png")


def _figures(row: Row, rate: float) -> dict[str, Any]:
    from k26jax.bench.rank import TokensRow

    found = dataclasses.asdict(row)
    if isinstance(row, TokensRow):
        return found | {"stage": "tokens"}
    return found | {"floor_seconds": row.floor_seconds(rate)}
