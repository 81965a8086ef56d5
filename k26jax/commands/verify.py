"""`k26jax verify`: whether a folder holds what it should, to the last bit."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from k26jax.commands.terminal import ByteProgress, say
from k26jax.errors import CheckpointError


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "verify",
        help="check every byte of a converted folder, or the files and values of a published one",
        description="Checks a converted folder against the hashes in its manifest, and a published "
        "one for damaged files, tensors that do not belong, NaN, infinity and zero scales. Exits "
        "with 3 and names the first differing tensor of each layer.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--against", type=Path, metavar="SOURCE", help="compare with this published folder too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 3 if anything is wrong."""
    from k26jax.checkpoint.reader import CONVERTED_MARK
    from k26jax.checkpoint.verify import size_to_read, verify

    if args.against and not (args.folder / CONVERTED_MARK).exists():
        raise CheckpointError(
            f"{args.folder} is no converted folder, so there is nothing to compare with "
            f"{args.against}; omit --against"
        )
    with ByteProgress("verify", size_to_read(args.folder)) as bar:
        found = verify(args.folder, args.against, progress=bar.advance)
    if args.json:
        print(json.dumps(dataclasses.asdict(found)))
    for note in found.notes:
        say(f"note: {note}")
    for fault in found.faults:
        say(f"fault: {fault}")
    say(f"{args.folder}: {found.tensors:,} tensors read, {len(found.faults) or 'no'} faults")
    return CheckpointError.exit_code if found.faults else 0
