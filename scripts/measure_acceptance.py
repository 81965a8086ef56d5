"""Measures tokens per target forward on prompts, with the package's own decoding step.

`python scripts/measure_acceptance.py --target checkpoints/k26-tiny --draft
checkpoints/k26-tiny-dflash --prompts checkpoints/heldout_prompts.jsonl`
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k26jax.checkpoint.load import load_params
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.config import DraftConfig, ModelConfig
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import abstract, bind
from k26jax.model.target import Target
from k26jax.spec.plan import Plan
from k26jax.spec.prefill import Chunk, prefill
from k26jax.spec.state import Models, Sampling, SpecState
from k26jax.spec.step import run_steps
from k26jax.text.tokenizer import load_tokenizer


class Measurement:
    """Both models of two folders, in float32, and one compiled program per plan."""

    def __init__(self, target: Path, draft: Path, width: int, max_tokens: int):
        config, draft_config = ModelConfig.from_folder(target), DraftConfig.from_folder(draft)
        draft_config.check_target(config)
        modules = (
            abstract(lambda rngs: Target(config, dtype=jnp.float32, rngs=rngs)),
            abstract(lambda rngs: Drafter(draft_config, dtype=jnp.float32, rngs=rngs)),
        )
        self.params = tuple(
            load_params(open_checkpoint(folder), module)
            for folder, module in zip((target, draft), modules, strict=True)
        )
        self.width, self.max_tokens = width, max_tokens
        capacity = width + max_tokens + draft_config.block_size

        def models(params: Any) -> Models:
            return Models(*(bind(m, p) for m, p in zip(modules, params, strict=True)))

        @jax.jit
        def start(params: Any, chunk: Chunk) -> SpecState:
            state = SpecState.empty(
                config, draft_config, slots=1, capacity=capacity, dtype=jnp.float32
            )
            return prefill(models(params), chunk, state, kernels="auto")[0]

        self._start = start
        self._run = jax.jit(
            lambda params, state, plan: run_steps(models(params), state, plan, max_tokens)[1],
            static_argnums=2,
        )

    def tokens_and_steps(self, prompt: list[int], plan: Plan) -> tuple[list[int], int]:
        """Returns the tokens emitted after a prompt, the first one excepted, and the steps."""
        ids = np.zeros(self.width, np.int32)
        ids[: len(prompt)] = prompt
        chunk = Chunk(
            token_ids=jnp.asarray(ids),
            count=jnp.int32(len(prompt)),
            start=jnp.int32(0),
            slot=jnp.int32(0),
            is_last=jnp.asarray(True),
            max_tokens=jnp.int32(self.max_tokens),
            sampling=Sampling.empty(1),
        )
        steps = self._run(self.params, self._start(self.params, chunk), plan)
        n_run = int(steps.n_run)
        tokens, counts = (
            np.asarray(steps.tokens[:n_run, 0]),
            np.asarray(steps.emitted_len[:n_run, 0]),
        )
        return [
            int(t) for row, count in zip(tokens, counts, strict=True) for t in row[:count]
        ], n_run


def main() -> None:
    """Prints tokens per target forward, prompt by prompt and on average."""
    parser = argparse.ArgumentParser(description="Measures acceptance on prompts.")
    parser.add_argument("--target", type=Path, default=Path("checkpoints/k26-tiny"))
    parser.add_argument("--draft", type=Path, default=Path("checkpoints/k26-tiny-dflash"))
    parser.add_argument("--prompts", type=Path, default=Path("checkpoints/heldout_prompts.jsonl"))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="*", default=[16])
    parser.add_argument("--bos", action="store_true", help="put [BOS] in front of the prompts")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.target)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    front = [tokenizer.bos_id] if args.bos else []
    prompts = [front + tokenizer.encode(json.loads(line)["prompt"]) for line in lines]
    width = -(-max(map(len, prompts)) // 32) * 32
    measurement = Measurement(args.target, args.draft, width, args.max_tokens)
    config = DraftConfig.from_folder(args.draft)
    plans = {f"tree {b}": Plan.tree(b, config.depth, config.block_size) for b in args.budgets}
    plans = {"plain": Plan.plain(), "chain": Plan.chain(config.depth, config.block_size), **plans}
    reference: list[list[int]] = []
    for name, plan in plans.items():
        begun, rates, outputs = time.monotonic(), [], []
        for prompt in prompts:
            tokens, steps = measurement.tokens_and_steps(prompt, plan)
            outputs.append(tokens)
            rates.append(len(tokens) / steps)
        reference = reference or outputs
        equal = sum(a == b for a, b in zip(reference, outputs, strict=True))
        print(f"{name}: mean {np.mean(rates):.3f} min {min(rates):.2f} max {max(rates):.2f}, same "
              f"tokens as plain decoding's on {equal} of {len(prompts)}, "
              f"{time.monotonic() - begun:.0f} s")  # fmt: skip
        print("  " + " ".join(f"{rate:.2f}" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
