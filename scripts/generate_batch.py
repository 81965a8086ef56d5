"""Continues every prompt of a JSONL file; run it again to go on where it was cut.

In: {"custom_id": "a", "prompt": "text"} or "prompt_token_ids", with any sampling parameter beside
it. Out: one line per request with its text, tokens, usage and speeds, or its error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from k26jax.commands.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from k26jax.errors import K26Error


def main() -> int:
    """Returns 0 if every line was answered, 1 if any failed, else the error's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-i", "--input", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    add_sampling_options(parser, max_tokens=128)
    add_engine_options(parser)
    args = parser.parse_args()
    try:
        from k26jax.batch import run_batch
        from k26jax.llm import LLM

        with LLM(**engine_options(args)) as llm:
            counts = run_batch(llm, args.input, args.output, sampling_options(args))
    except K26Error as error:
        print(f"generate_batch: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("generate_batch: interrupted; run the same command to go on", file=sys.stderr)
        return 130
    print(
        f"{counts.done} done, {counts.skipped} already there, {counts.failed} failed",
        file=sys.stderr,
    )
    return 1 if counts.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
