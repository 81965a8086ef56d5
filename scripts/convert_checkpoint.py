"""Converts a published checkpoint; the same as `k26jax convert`.

python scripts/convert_checkpoint.py SOURCE TARGET [--dry-run] [--resume] [--to-hf] ...
"""

from __future__ import annotations

import sys

from k26jax.cli import Parser, run_command
from k26jax.commands.convert import add_arguments


def main() -> int:
    """Returns the exit code, as the command line's."""
    parser = Parser(prog="convert_checkpoint.py", description=__doc__)
    add_arguments(parser)
    return run_command(parser)


if __name__ == "__main__":
    sys.exit(main())
