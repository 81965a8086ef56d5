"""`k26jax inspect`: what a model folder holds, and what would not load and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k26jax.errors import CheckpointError

if TYPE_CHECKING:
    from k26jax.checkpoint.summary import Summary


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser("inspect", help="show what a folder holds", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 3 if the folder would not load."""
    from k26jax.checkpoint.summary import summarize

    summary = summarize(args.folder)
    if args.json:
        print(json.dumps(dataclasses.asdict(summary)))
    else:
        print(_table(summary))
    if summary.fault:
        print(f"would not load: {summary.fault}", file=sys.stderr)
        return CheckpointError.exit_code
    return 0


def _table(summary: Summary) -> str:
    lines = [f"{summary.folder}: {summary.kind}"]
    lines += [f"  {name:32} {value}" for name, value in summary.facts.items()]
    lines.append(f"  {'component':32} {'parameters':>18} {'bytes':>18}")
    for component, count in sorted(summary.parameters.items(), key=lambda item: -item[1]):
        lines.append(f"  {component:32} {count:18,} {summary.stored_bytes[component]:18,}")
    total, size = sum(summary.parameters.values()), sum(summary.stored_bytes.values())
    lines.append(f"  {'all':32} {total:18,} {size:18,}")
    lines += [
        f"  stored as {dtype:22} {'':18} {size:18,}" for dtype, size in summary.dtypes.items()
    ]
    lines += [f"  skipped: {count} tensors, {why}" for why, count in summary.skipped.items()]
    return "\n".join(lines)
