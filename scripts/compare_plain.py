"""Runs plain decoding and speculative decoding in turns on the same prompts, in one process.

`python scripts/compare_plain.py --budget 8 16 auto` uses the trained pair in checkpoints/ and its
held-out prompts. Each prompt is run by all engines one after the other, in every round, so that
what else the machine does meets all of them. Prints, per prompt, the speeds (medians over rounds),
tokens per target forward, and whether the tokens are the same; then a line for every budget.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from k26jax import LLM, RequestOutput, SamplingParams

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"
PLAIN = "plain"


def main() -> int:
    """Returns the exit code: 1 if any prompt's tokens differ."""
    args = _arguments()
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=1
    )
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for budget in args.budget:
            llm = LLM(
                args.model_path,
                speculative_draft_model_path=args.draft_model_path,
                speculative_algorithm=args.algorithm,
                speculative_ddtree_budget=budget,
                max_running_requests=1,
            )
            if not engines:
                engines[PLAIN] = stack.enter_context(llm.without_drafter())
            engines[str(budget)] = stack.enter_context(llm)
            if llm.step_costs is not None:
                print(f"milliseconds a step: {json.dumps(llm.step_costs)}", flush=True)
        for llm in engines.values():
            llm.generate(prompts[0], params)
        return 0 if compare(engines, prompts, params, args.rounds) else 1


def compare(
    engines: dict[str, LLM], prompts: list[str], params: SamplingParams, rounds: int
) -> bool:
    """Prints all figures and returns whether all tokens were those of plain decoding."""
    seconds = {name: np.zeros((rounds, len(prompts))) for name in engines}
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in engines}
    for turn in range(rounds):
        for number, prompt in enumerate(prompts):
            for name, llm in engines.items():
                output = llm.generate(prompt, params)[0]
                metrics = output.metrics
                seconds[name][turn, number] = metrics.e2e_seconds - metrics.ttft_seconds
                if turn == 0:
                    outputs[name].append(output)
            if turn == rounds - 1:
                _print_prompt(number, seconds, outputs)
    return all([_summary(name, seconds, outputs) for name in engines])


def _print_prompt(
    number: int, seconds: dict[str, np.ndarray], outputs: dict[str, list[RequestOutput]]
) -> None:
    parts = []
    for name, found in outputs.items():
        output = found[number]
        speed = _tokens(output) / np.median(seconds[name][:, number])
        parts.append(f"{name} {speed:.1f} tok/s")
        if name != PLAIN:
            same = _ids(output) == _ids(outputs[PLAIN][number])
            parts[-1] += f" at {output.metrics.accept_length:.2f} tokens a forward"
            parts[-1] += "" if same else ", DIFFERENT TOKENS"
    print(f"{number:3d}  " + "; ".join(parts), flush=True)


def _summary(
    name: str, seconds: dict[str, np.ndarray], outputs: dict[str, list[RequestOutput]]
) -> bool:
    """Prints one engine's figures and returns whether its tokens were those of plain decoding."""
    tokens = np.array([_tokens(output) for output in outputs[name]])
    mine, plain = np.median(seconds[name], axis=0), np.median(seconds[PLAIN], axis=0)
    same = sum(_ids(a) == _ids(b) for a, b in zip(outputs[name], outputs[PLAIN], strict=True))
    accept = np.mean([output.metrics.accept_length for output in outputs[name]])
    rows = Counter[int]()
    for output in outputs[name]:
        rows.update(output.metrics.rows)
    by_rows = ", ".join(f"{count} of {width}" for width, count in sorted(rows.items()))
    print(
        f"{'' if name == PLAIN else 'budget '}{name}: {(tokens / mine).mean():.1f} tok/s, of total "
        f"times {tokens.sum() / mine.sum():.1f}; ratio to plain of mean speeds "
        f"{(tokens / mine).mean() / (tokens / plain).mean():.2f}, of total times "
        f"{plain.sum() / mine.sum():.2f}; {accept:.2f} tokens a forward; same tokens on {same} of "
        f"{len(tokens)}" + (f"; steps by rows: {by_rows}" if by_rows else ""),
        flush=True,
    )
    return same == len(tokens)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default=str(CHECKPOINTS / "k26-tiny"))
    parser.add_argument("--draft-model-path", default=str(CHECKPOINTS / "k26-tiny-dflash"))
    parser.add_argument("--prompts", default=str(CHECKPOINTS / "heldout_prompts.jsonl"))
    parser.add_argument("--algorithm", default="DDTREE", choices=["DDTREE", "DFLASH"])
    parser.add_argument(
        "--budget", type=_budget, nargs="+", default=[16], help="numbers of nodes, or auto"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often all is run")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def _budget(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def _tokens(output: RequestOutput) -> int:
    return output.metrics.generated_tokens - 1


if __name__ == "__main__":
    raise SystemExit(main())
