"""`k26jax plan`: predicted step times and speeds of a model on some GPUs, and the best budget."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k26jax.bench.calibrate import calibrated, compare, merged, worst
from k26jax.bench.costs import ALL_REDUCES, CARDS, Costs, all_reduce, card
from k26jax.bench.perf_model import WIDTHS, Setting, Step, best, predict, rank_bytes
from k26jax.bench.published import MODELS, has_published_drafter, published
from k26jax.bench.step_parts import check_ranks
from k26jax.commands.options import algorithms_of, widths_of
from k26jax.commands.terminal import new_figure
from k26jax.errors import CapacityError, ConfigError, MeshError

_ACCEPT_LENGTHS = (3, 4, 5, 6)
_SPARE = 0.95  # of the memory: programs and their scratch space take some


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "plan",
        help="predict speed and memory of a model on some GPUs",
        description="Predicts, without a GPU, the time of a step and the tokens a second over "
        "widths of verification, from bytes, operations, kernels and all-reduces; names the best "
        "budget, and says whether the model fits. Figures that were measured, and where, stand in "
        "k26jax/bench/costs.py; --measured replaces them by those of a `bench rank` here.",
    )
    add = parser.add_argument
    add("--config", default=MODELS[0], choices=MODELS, help="model (default: %(default)s)")
    add("--gpu", default="h200", choices=tuple(CARDS), help="(default: %(default)s)")
    add("--gpus", type=int, default=8, help="how many in all (default: %(default)s)")
    add("--tp-size", type=int, help="(default: all GPUs that --ep-size leaves)")
    add("--ep-size", type=int, default=1, help="(default: %(default)s)")
    add("--hosts", type=int, default=1, help="that the GPUs are on (default: %(default)s)")
    add("--context", type=int, default=4096, help="tokens of each user (default: %(default)s)")
    add("--users", type=int, default=1, help="at the same time (default: %(default)s)")
    add("--algorithm", default="NONE,DDTREE", help="NONE, DDTREE or both (default: %(default)s)")
    add("--width", default=",".join(map(str, WIDTHS)), help="rows of a step (default: %(default)s)")
    add(
        "--accept-length",
        type=float,
        default=4.0,
        metavar="N",
        help="tokens a step that a chain of the drafter's whole block gives (default: %(default)s)",
    )
    add("--all-reduce", metavar="NAME", help="one of the link's measurements (default: each)")
    add(
        "--measured",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="costs from `bench rank --json`; several files of different widths count as one",
    )
    add("--routing", type=Path, metavar="FILE", help="distinct experts from a trace: see the docs")
    add("--plot", type=Path, metavar="FILE", help="draw times and speeds as a PNG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0.

    Raises: ConfigError or MeshError for what cannot be planned; CapacityError, after the table, if
      the model does not fit.
    """
    setting = setting_of(args)
    if args.plot:
        new_figure((1, 1))
    if args.measured:
        record = merged(args.measured)
        costs = calibrated(record, setting)
        setting = dataclasses.replace(setting, costs=costs)
        if setting.card.name in record.get("device", ""):
            rate = record["read_bytes_a_second"]
            measured = dataclasses.replace(setting.card, read_bytes_a_second=rate)
            setting = dataclasses.replace(setting, card=measured)
        print("\n".join(comparison(record, setting)))
    print("\n".join(heading(args, setting)))
    widths = widths_of(args.width)
    wanted = [1] if "NONE" in algorithms_of(args.algorithm) else []
    if "DDTREE" in algorithms_of(args.algorithm):
        wanted += [width for width in widths if width > 1]
    drawn = {}
    for known in _all_reduces(args, setting):
        one = dataclasses.replace(setting, all_reduce=known)
        steps = [predict(one, width) for width in wanted]
        print("\n".join(table(one, steps)))
        drawn[known.name] = steps
    if args.plot:
        draw(drawn, args.plot, title=", ".join(heading(args, setting)[:1]))
    _require_memory(setting)
    return 0


def setting_of(args: argparse.Namespace) -> Setting:
    """Returns what the flags describe, with the first all-reduce of the link.

    Raises: ConfigError or MeshError if they make no sense together.
    """
    for name in ("gpus", "ep_size", "hosts", "context", "users"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(args, name)}: expected 1 or more")
    tp_size = args.tp_size or max(args.gpus // args.ep_size, 1)
    if tp_size * args.ep_size != args.gpus:
        raise MeshError(
            f"--tp-size {tp_size} times --ep-size {args.ep_size} is not --gpus {args.gpus}"
        )
    if args.gpus % args.hosts:
        raise MeshError(f"--gpus {args.gpus} cannot be shared evenly by --hosts {args.hosts}")
    model, draft = published(args.config)
    check_ranks(model, tp_size, args.ep_size)
    if args.context > model.max_position_embeddings:
        raise ConfigError(
            f"--context {args.context}: {args.config} has {model.max_position_embeddings} positions"
        )
    chosen = card(args.gpu)
    drafts = "DDTREE" in algorithms_of(args.algorithm)
    return Setting(
        model=model,
        draft=draft if drafts else None,
        card=chosen,
        all_reduce=ALL_REDUCES[chosen.link][0],
        costs=Costs(),
        tp_size=tp_size,
        ep_size=args.ep_size,
        hosts=args.hosts,
        context=args.context,
        users=args.users,
        accept_length=args.accept_length,
        routing=read_routing(args.routing) if args.routing else None,
    )


def read_routing(path: Path) -> tuple[tuple[int, float], ...]:
    """Returns the distinct experts of a layer by rows, of a file with one of two fields.

    touched: {"16": 95.2, ...}, distinct experts by rows. topk_ids: of some steps, of each MoE
    layer, of each row, the chosen experts; the first rows of a step stand for a narrower one.

    Raises: ConfigError if it is no such file.
    """
    try:
        record = json.loads(path.read_text())
        if "touched" in record:
            return tuple(sorted((int(rows), float(n)) for rows, n in record["touched"].items()))
        steps = record["topk_ids"]
        most = min(len(rows) for layers in steps for rows in layers)
        layers = [rows for layers in steps for rows in layers]
        return tuple((n, _distinct(layers, n)) for n in range(1, most + 1))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path}: expected an object with 'touched' (distinct experts by rows) or 'topk_ids' "
            f"[step][layer][row][expert] ({error!r})"
        ) from error


def heading(args: argparse.Namespace, setting: Setting) -> list[str]:
    """Returns what is planned, in words, and what each GPU holds."""
    shares = f"TP-{setting.tp_size}" + (f" x EP-{setting.ep_size}" if setting.ep_size > 1 else "")
    hosts = f" on {setting.hosts} hosts" if setting.hosts > 1 else ""
    users = f", {setting.users} users" if setting.users > 1 else ""
    held, most = rank_bytes(setting), setting.card.memory_bytes
    fit = "fits" if sum(held.values()) <= most * _SPARE else "DOES NOT FIT"
    parts = " + ".join(f"{size / 1e9:.2f} GB of {what}" for what, size in held.items())
    lines = [
        f"{args.config} on {args.gpus} x {setting.card.name}{hosts}, {shares}, context "
        f"{setting.context}{users}",
        f"card: reads {setting.card.read_bytes_a_second / 1e12:.2f} TB/s; {setting.card.source}",
        f"kernels: {setting.costs.source}",
        f"each GPU: {parts} of {most / 1e9:.1f} GB: {fit}",
    ]
    if setting.draft is not None and not has_published_drafter(args.config):
        lines.append("drafter: none is published; one of the published Kimi one's form")
    return lines


def table(setting: Setting, steps: Sequence[Step]) -> list[str]:
    """Returns the predicted steps as lines, then the best of them."""
    fixed = "  ".join(f"{n:>5}" for n in _ACCEPT_LENGTHS)
    lines = [
        "",
        f"all-reduce {setting.all_reduce.name}: {setting.all_reduce.source}",
        "width  experts      GB  floor ms  rank ms  sums ms  step ms  tokens  tokens/s"
        f"  at accept length {fixed}",
    ]
    for step in steps:
        speeds = [
            f"{step.tokens_a_second(n):5.0f}" if n <= step.width else "    -"
            for n in _ACCEPT_LENGTHS
        ]
        lines.append(
            f"{step.width:5}  {step.touched:7.1f}  {step.n_bytes / 1e9:6.2f}  "
            f"{step.floor_seconds * 1e3:8.2f}  {step.rank_seconds * 1e3:7.2f}  "
            f"{step.message_seconds * 1e3:7.2f}  {step.seconds * 1e3:7.2f}  {step.tokens:6.2f}  "
            f"{step.tokens_a_second():8.1f}                    {'  '.join(speeds)}"
        )
    chosen = best(steps)
    how = "plain decoding" if chosen.width == 1 else f"budget {chosen.width - 1}"
    total = chosen.tokens_a_second() * setting.users
    all_users = f", {total:.0f} of all users" if setting.users > 1 else ""
    lines.append(
        f"best: {how} (width {chosen.width}): {chosen.tokens_a_second():.1f} tokens/s{all_users}"
    )
    return lines


def comparison(record: dict[str, Any], setting: Setting) -> list[str]:
    """Returns measured rows beside predictions, with the costs that were fitted to them."""
    rows = compare(record, setting)
    lines = [f"{'width':>5}  {'stage':10}  measured us  predicted us  error"]
    lines += [
        f"{row.width:5}  {row.stage:10}  {row.measured_seconds * 1e6:11.1f}  "
        f"{row.predicted_seconds * 1e6:12.1f}  {row.error:+6.1%}"
        for row in rows
    ]
    return [*lines, f"greatest error of a step: {worst(rows):.1%}", ""]


def draw(drawn: dict[str, list[Step]], path: Path, *, title: str) -> None:
    """Writes a picture: time of a step with its floor, and tokens a second, over width.

    Raises: KernelError if matplotlib is not installed.
    """
    figure = new_figure((10, 4.5))
    left, right = figure.subplots(1, 2)
    for name, steps in drawn.items():
        widths = [step.width for step in steps]
        left.plot(widths, [step.seconds * 1e3 for step in steps], "o-", label=f"{name} sums")
        right.plot(widths, [step.tokens_a_second() for step in steps], "o-", label=f"{name} sums")
    steps = next(iter(drawn.values()))
    widths = [step.width for step in steps]
    left.plot(widths, [step.rank_seconds * 1e3 for step in steps], ":", label="one rank alone")
    left.plot(widths, [step.floor_seconds * 1e3 for step in steps], "k--", label="its bytes")
    for axes, label in ((left, "ms a step"), (right, "tokens a second and user")):
        axes.set_xlabel("rows of a step")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, format="png")


def _all_reduces(args: argparse.Namespace, setting: Setting) -> list[Any]:
    link = setting.card.link
    return [all_reduce(link, args.all_reduce)] if args.all_reduce else list(ALL_REDUCES[link])


def _require_memory(setting: Setting) -> None:
    needed, most = sum(rank_bytes(setting).values()), setting.card.memory_bytes * _SPARE
    if needed > most:
        raise CapacityError(
            f"each GPU would hold {needed / 1e9:.1f} GB, and {most / 1e9:.1f} GB of "
            f"{setting.card.name} are left beside programs; use more GPUs, a shorter --context or "
            "fewer --users"
        )


def _distinct(layers: Sequence[Any], rows: int) -> float:
    counts = [len({expert for row in layer[:rows] for expert in row}) for layer in layers]
    return sum(counts) / len(counts)
