"""`k26jax convert`: from published files to a folder that loads fast on any mesh, and back."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k26jax.commands.terminal import ByteProgress, peak_host_bytes, say
from k26jax.errors import RequestError

if TYPE_CHECKING:
    from k26jax.checkpoint.convert import Conversion
    from k26jax.checkpoint.export import Export

MEMORY_BOUND = 2.5  # of the largest layer


def add(commands: Any) -> None:
    """Adds the command's parser."""
    add_arguments(
        commands.add_parser(
            "convert",
            help="make a folder that loads fast on any mesh, or published files of one",
            description="Converts published safetensors into one Orbax tree a layer with a "
            "manifest of hashes, beside the configuration and tokenizer files. Streams: memory "
            "stays below one layer. TARGET appears when it is whole; until then the work lies in "
            "TARGET.partial, which --resume goes on with.",
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to a parser."""
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument(
        "--tp-size", type=_count, default=1, metavar="N", help="ranks that will cut heads, expert "
        "width and vocabulary: stored pieces end on their borders (default: 1; any mesh loads any)"
    )  # fmt: skip
    parser.add_argument(
        "--ep-size", type=_count, default=1, metavar="N", help="ranks that will share out the "
        "experts (default: 1)"
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto",
        help="of float weights (default: auto, each as published and FP8 blocks in bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=_count, metavar="N", help="keep the first N layers only (default: all)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    parser.add_argument(
        "--resume", action="store_true", help="go on with unfinished work of the same request, if "
        "there is any"
    )  # fmt: skip
    parser.add_argument(
        "--to-hf", action="store_true", help="back: from a converted SOURCE to published files"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the target is complete, or the plan is printed."""
    return _to_hf(args) if args.to_hf else _convert(args)


def _convert(args: argparse.Namespace) -> int:
    from k26jax.checkpoint.convert import ConvertOptions, convert, plan_conversion

    options = ConvertOptions(args.dtype, args.layers, args.tp_size, args.ep_size)
    plan = plan_conversion(args.source, args.target, options)
    if args.dry_run:
        print("\n".join(_plan_lines(plan)))
        return 0
    say(
        f"convert {args.source} to {args.target}: {len(plan.manifest.trees)} trees, "
        f"{plan.total_bytes:,} bytes"
    )
    with ByteProgress("convert", plan.total_bytes) as bar:
        convert(plan, resume=args.resume, progress=bar.advance, on_kept=bar.skip)
    _say_memory(plan.largest_bytes)
    say(f"done: {args.target}; check it with `k26jax verify {args.target}`")
    return 0


def _to_hf(args: argparse.Namespace) -> int:
    from k26jax.checkpoint.export import export, plan_export

    given = {
        "--dtype": args.dtype != "auto",
        "--layers": args.layers is not None,
        "--tp-size": args.tp_size > 1,
        "--ep-size": args.ep_size > 1,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        raise RequestError(f"{flag} has no meaning with --to-hf, which changes no tensor; omit it")
    plan = plan_export(args.source, args.target)
    if plan.changed:
        say(
            f"note: {len(plan.changed)} parameters were converted to another dtype (first "
            f"{plan.changed[0]}); their published bits are not in {args.source}"
        )
    if args.dry_run:
        print("\n".join(_export_lines(plan)))
        return 0
    with ByteProgress("export", plan.total_bytes) as bar:
        export(plan, resume=args.resume, progress=bar.advance, on_kept=bar.skip)
    _say_memory(None)
    say(f"done: {args.target}, {len(plan.shards)} files")
    return 0


def _plan_lines(plan: Conversion) -> Iterator[str]:
    """Yields one line an array: source, target, shape, dtype, pieces, bytes; then the totals."""
    from k26jax.checkpoint.layout import cuts
    from k26jax.checkpoint.workspace import free_bytes

    options = plan.manifest.options
    cut = cuts(options["tp_size"], options["ep_size"])
    arrays = tensors = 0
    for tree, array in plan.manifest.arrays():
        files = dict.fromkeys(plan.checkpoint.entry(name).file.name for name in array.tensors)
        source = array.tensors[0]
        if array.experts:
            source = source.replace(".experts.0.", f".experts.{{0..{len(array.tensors) - 1}}}.")
        axes = ", ".join(f"{axis}/{cut[axis]}" if axis in cut else axis for axis in array.axes)
        change = "" if array.is_exact else f" from {array.tensor_dtype}"
        yield (
            f"{plan.manifest.prefix}{source} [{', '.join(files)}] -> {tree.name} {array.path} "
            f"{list(array.shape)} {array.dtype}{change} ({axes}) in pieces of "
            f"{list(array.chunk)}, {array.size_bytes:,} bytes"
        )
        arrays, tensors = arrays + 1, tensors + len(array.tensors)
    for name, why in list(plan.checkpoint.skipped.items())[:3]:
        yield f"skipped: {name}: {why}"
    if len(plan.checkpoint.skipped) > 3:
        yield f"skipped: {len(plan.checkpoint.skipped) - 3} more"
    yield f"copied: {', '.join(plan.copied)}"
    ranks = options["tp_size"] * options["ep_size"]
    yield (
        f"total: {len(plan.manifest.trees)} trees, {arrays} arrays of {tensors} tensors, "
        f"{plan.total_bytes:,} bytes; largest tree {plan.largest_bytes:,}; about "
        f"{_rank_bytes(plan, cut):,} bytes a rank of {ranks}; {free_bytes(plan.target):,} bytes "
        f"free at {plan.target}"
    )


def _rank_bytes(plan: Conversion, cut: dict[str, int]) -> int:
    total = 0
    for _, array in plan.manifest.arrays():
        size = array.size_bytes
        for axis in array.axes:
            size //= cut.get(axis, 1)
        total += size
    return total


def _export_lines(plan: Export) -> Iterator[str]:
    for shard in plan.shards:
        for tensor in shard.tensors:
            yield f"{tensor.name} -> {shard.name} {list(tensor.shape)} {tensor.dtype}"
    yield f"total: {len(plan.shards)} files, {plan.total_bytes:,} bytes"


def _say_memory(largest_bytes: int | None) -> None:
    peak = peak_host_bytes()
    if peak is None:
        return
    text = f"peak host memory {peak / 1e9:.2f} GB"
    # What Python and its libraries take hides the ratio below that.
    if largest_bytes is not None and largest_bytes > 1e9:
        text += (
            f", {peak / largest_bytes:.2f} times the largest tree of {largest_bytes / 1e9:.2f} GB "
            f"(bound: {MEMORY_BOUND})"
        )
    say(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
