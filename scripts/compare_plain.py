"""Runs plain decoding and speculative decoding side by side on the same prompts, in one process.

`python scripts/compare_plain.py --budget 8 16` uses the trained pair in checkpoints/ and its
held-out prompts. Prints, per prompt, both speeds and tokens per target forward, and whether the
tokens are the same; and a line of means for every budget.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from k26jax import LLM, RequestOutput, SamplingParams

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"


def main() -> int:
    """Returns the exit code: 1 if any prompt's tokens differ."""
    args = _arguments()
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=1
    )
    results = [compare(args, budget, prompts, params) for budget in args.budget]
    return 0 if all(results) else 1


def compare(
    args: argparse.Namespace, budget: int, prompts: list[str], params: SamplingParams
) -> bool:
    """Prints one budget's figures and returns whether all tokens were those of plain decoding."""
    with LLM(
        args.model_path,
        speculative_draft_model_path=args.draft_model_path,
        speculative_algorithm=args.algorithm,
        speculative_ddtree_budget=budget,
        max_running_requests=1,
    ) as llm:
        engines = (llm.without_drafter(), llm)
        for engine in engines:
            engine.generate(prompts[0], params)
        rows = []
        for number, prompt in enumerate(prompts):
            plain, drafted = (engine.generate(prompt, params)[0] for engine in engines)
            rows.append(_row(plain, drafted))
            print(
                f"{number:3d}  plain {rows[-1][0]:7.1f} tok/s  {args.algorithm} "
                f"{rows[-1][1]:7.1f} tok/s  {rows[-1][2]:.2f} tokens a forward  "
                f"{'same tokens' if rows[-1][3] else 'DIFFERENT TOKENS'}",
                flush=True,
            )
    plain, drafted, accept, same = (np.array(column, float) for column in zip(*rows, strict=True))
    print(
        f"budget {budget}: plain {plain.mean():.1f} tok/s, {args.algorithm} {drafted.mean():.1f} "
        f"tok/s; ratio of mean speeds {drafted.mean() / plain.mean():.2f}, of total times "
        f"{(1 / plain).sum() / (1 / drafted).sum():.2f}; {accept.mean():.2f} tokens a forward "
        f"({accept.min():.2f} to {accept.max():.2f}); same tokens on {int(same.sum())} of "
        f"{len(rows)}",
        flush=True,
    )
    return bool(same.all())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default=str(CHECKPOINTS / "k26-tiny"))
    parser.add_argument("--draft-model-path", default=str(CHECKPOINTS / "k26-tiny-dflash"))
    parser.add_argument("--prompts", default=str(CHECKPOINTS / "heldout_prompts.jsonl"))
    parser.add_argument("--algorithm", default="DDTREE", choices=["DDTREE", "DFLASH"])
    parser.add_argument("--budget", type=int, nargs="+", default=[16])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def _row(plain: RequestOutput, drafted: RequestOutput) -> tuple[float, float, float, bool]:
    equal = plain.outputs[0].token_ids == drafted.outputs[0].token_ids
    speeds = plain.metrics.tokens_per_second, drafted.metrics.tokens_per_second
    return (*speeds, drafted.metrics.accept_length, equal)


if __name__ == "__main__":
    raise SystemExit(main())
