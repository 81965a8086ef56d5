"""The trained pair on the meshes that can share it: its tokens are those of one device."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from fixtures.paths import REPOSITORY

from k26jax import LLM, SamplingParams

CHECKPOINTS = REPOSITORY / "checkpoints"


@functools.cache
def _run(ep_size: int, algorithm: str) -> tuple[list[list[int]], np.ndarray]:
    """Greedy and seeded tokens of three held-out prompts, and logits."""
    lines = (CHECKPOINTS / "heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:3]]
    with LLM(
        str(CHECKPOINTS / "k26-tiny"),
        speculative_draft_model_path=str(CHECKPOINTS / "k26-tiny-dflash"),
        speculative_algorithm=algorithm,
        speculative_ddtree_budget=8,
        max_running_requests=2,
        context_length=256,
        chunked_prefill_size=64,
        ep_size=ep_size,
    ) as llm:
        outputs = [
            output.outputs[0].token_ids
            for params in (
                SamplingParams(temperature=0, max_tokens=24),
                SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24),
            )
            for output in llm.generate(prompts, params, raise_on_error=True)
        ]
        return outputs, llm.logits(llm.encode(prompts[0])[:50])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["NONE", "DFLASH", "DDTREE"])
@pytest.mark.parametrize("ep_size", [2, 8])
def test_tokens_and_logits_are_those_of_one_device(ep_size, algorithm):
    """160 expert inputs are five INT4 groups, so that only `expert` can be cut."""
    tokens, logits = _run(1, algorithm)
    found, on_mesh = _run(ep_size, algorithm)
    assert found == tokens
    np.testing.assert_allclose(on_mesh, logits, atol=1e-4)
