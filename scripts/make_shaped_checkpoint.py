"""Writes random weights of any configuration's shapes in the published layout, streamed.

python scripts/make_shaped_checkpoint.py config.json TARGET [--layers N] [--seed N] [--dry-run]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from k26jax.cli import Parser, run_command
from k26jax.commands.terminal import ByteProgress, say
from k26jax.config import read_json


def main() -> int:
    """Returns the exit code, as the command line's."""
    parser = Parser(prog="make_shaped_checkpoint.py", description=__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a config.json, or its folder")
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--layers", type=int, metavar="N", help="write the first N layers only")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="(default: 0)")
    parser.add_argument("--dry-run", action="store_true", help="print the files, write nothing")
    parser.set_defaults(run=run)
    return run_command(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the folder is written, or its files are printed."""
    from k26jax.checkpoint.models import with_layers
    from k26jax.checkpoint.shaped import shaped_shards, write_shaped

    path = args.config / "config.json" if args.config.is_dir() else args.config
    config = read_json(path)
    if args.layers is not None:
        config = with_layers(config, args.layers)
    shards = shaped_shards(config)
    for shard in shards if args.dry_run else ():
        print(f"{shard.name} {len(shard.tensors):,} tensors {shard.file_bytes:,} bytes")
    if not args.dry_run:
        total = sum(tensor.size_bytes for shard in shards for tensor in shard.tensors)
        with ByteProgress("write", total) as bar:
            write_shaped(config, args.target, seed=args.seed, progress=bar.advance)
    say(f"{len(shards)} files, {sum(shard.file_bytes for shard in shards):,} bytes")
    return 0


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
