"""`k26jax bench`: kernels or a rank's programs on a GPU, or a server as its clients see it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k26jax.commands import bench_prefill, bench_rank, bench_serving
from k26jax.commands.terminal import new_figure, say
from k26jax.errors import KernelError

if TYPE_CHECKING:
    from k26jax.bench.kernels import Rates, Row


def add(commands: Any) -> None:
    """Adds the command's parser, and one for each thing it measures."""
    parser = commands.add_parser(
        "bench",
        help="measure kernels, a rank or a server",
        description="Measures kernels or the steps of a rank on this machine's GPU, or a server.",
    )
    things = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    kernels = things.add_parser(
        "kernels",
        help="every kernel",
        description="Measures every kernel at the sizes of one of eight ranks of Kimi K2.6: time, "
        "the bytes that must move, the time in which a plain kernel reads as many, or matrices of "
        "as many operations are multiplied (both measured in the same run), and the ratio. A line "
        "is printed as soon as it is measured.",
    )
    kernels.add_argument("--kernel", nargs="+", metavar="NAME", help="only these, in this order")
    add_outputs(kernels)
    kernels.set_defaults(run=run)
    add_outputs(bench_rank.add(things))
    bench_prefill.add(things)
    bench_serving.add(things)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what is written besides text."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them as a PNG too")


def run(args: argparse.Namespace) -> int:
    """Returns 0 once everything was measured.

    Raises: KernelError without a GPU, or for an unknown kernel.
    """
    import jax

    from k26jax.bench.kernels import FAMILIES, Rates, measure
    from k26jax.bench.timing import operations_a_second, read_bytes_a_second
    from k26jax.errors import nearest
    from k26jax.pallas.gpu import architecture

    for name in args.kernel or ():
        if name not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise KernelError(f"no kernel {name!r}; there are {known}{nearest(name, FAMILIES)}")
    if architecture() is None:
        raise KernelError("bench kernels needs a GPU: interpreted kernels say nothing about time")
    device = jax.devices()[0].device_kind
    rates = Rates(read_bytes_a_second(), operations_a_second())
    say(
        f"{device}, JAX {jax.__version__}; a plain kernel reads "
        f"{rates.read_bytes_a_second / 1e12:.2f} TB/s, XLA multiplies matrices at "
        f"{rates.operations_a_second / 1e12:.0f} TFLOP/s"
    )
    record = {"device": device, "jax": jax.__version__, **rates._asdict()}
    rows: list[Row] = []
    for row in measure(args.kernel):
        rows.append(row)
        print(line(row, rates), flush=True)
        if args.json:
            # As it grows: a machine may be taken away before the end.
            figures = [vars(item) | {"floor_seconds": item.floor_seconds(rates)} for item in rows]
            args.json.write_text(json.dumps(record | {"rows": figures}, indent=1) + "\n")
    if args.plot:
        draw(rows, rates, args.plot, title=device)
    return 0


def line(row: Row, rates: Rates) -> str:
    """Returns one case as a line of text."""
    floor = row.floor_seconds(rates)
    return (
        f"{row.kernel:12} {row.case:40} {row.by:11} {row.seconds * 1e6:9.1f} us, "
        f"floor {floor * 1e6:8.1f} us, "
        f"{row.n_bytes / row.seconds / 1e12:5.2f} TB/s, {floor / row.seconds:4.0%} of the best"
    )


def draw(rows: Sequence[Row], rates: Rates, path: Path, *, title: str) -> None:
    """Writes a bar chart of the bandwidth that each case reaches.

    Raises: KernelError if matplotlib is not installed.
    """
    figure = new_figure((9, 1 + 0.22 * len(rows)))
    axes = figure.subplots()
    ours = [row for row in rows if row.by == "k26jax"]
    names = [f"{row.kernel}, {row.case}" for row in ours]
    axes.barh(names, [row.n_bytes / row.seconds / 1e12 for row in ours])
    axes.axvline(
        rates.read_bytes_a_second / 1e12, color="black", linestyle="--", label="plain read"
    )
    axes.invert_yaxis()
    axes.set_xlabel("TB/s")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, format="png")
