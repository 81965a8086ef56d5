"""On a GPU, in bfloat16: a tree's tokens are those of plain decoding, through the kernels.

JAX_PLATFORMS=cuda python -m pytest -m gpu tests/e2e/test_gpu_tokens.py
"""

import json

import jax
import numpy as np
import pytest
from fixtures.paths import REPOSITORY

from k26jax import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PAIR = {
    "model_path": REPOSITORY / "checkpoints" / "k26-tiny",
    "speculative_draft_model_path": REPOSITORY / "checkpoints" / "k26-tiny-dflash",
    "dtype": "bfloat16",
    "kernels": "pallas",
    "context_length": 1024,
    "max_running_requests": 4,
    "steps_per_dispatch": 32,
    "compile_cache_dir": "none",
}
LAWS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1.0, "seed": 7}}


def generated(**options) -> dict[str, list[list[int]]]:
    """The tokens of 20 prompts of 256 tokens, by law."""
    lines = (REPOSITORY / "checkpoints" / "heldout_prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines][:20]
    with LLM(**PAIR, **options) as llm:
        return {
            name: [
                output.outputs[0].token_ids
                for output in llm.generate(
                    prompts, SamplingParams(max_tokens=256, ignore_eos=True, **law)
                )
            ]
            for name, law in LAWS.items()
        }


SHAPES = [
    {"json": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 4}},
    {"regex": "[a-z_]+ = [0-9]{3}"},
    None,
]


def shaped(**options) -> list[list[int]]:
    """The tokens of answers of given shapes, beside free ones."""
    with LLM(**PAIR, **options) as llm:
        return [
            output.outputs[0].token_ids
            for output in llm.generate(
                ["x = ", "def main():\n"] * 6,
                [
                    SamplingParams(max_tokens=96, structured_outputs=shape, **law)
                    for shape in SHAPES
                    for law in LAWS.values()
                    for _ in range(2)
                ],
                raise_on_error=True,
            )
        ]


def test_answers_of_a_shape_are_those_of_plain_decoding():
    assert shaped(speculative_ddtree_budget=16) == shaped(speculative_algorithm="NONE")


def cached(**options) -> list[np.ndarray]:
    """The cache rows of one prompt, of several chunks."""
    prompt = [int(token) for token in np.random.default_rng(0).integers(1, 2000, 300)]
    with LLM(**PAIR, chunked_prefill_size=128, **options) as llm:
        llm.generate([prompt], SamplingParams(max_tokens=1))
        state = llm.engine.runner._state
        return [np.asarray(x)[:, 0, : len(prompt)] for x in jax.tree.leaves(state.cache)]


def test_a_prompt_leaves_the_same_bits_with_and_without_a_drafter():
    for one, other in zip(cached(speculative_algorithm="NONE"), cached(), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.fixture(scope="module")
def plain():
    assert jax.default_backend() == "gpu", "start with JAX_PLATFORMS=cuda"
    return generated(speculative_algorithm="NONE")


@pytest.mark.parametrize("budget", [1, 2, 4, 8, 16, 32, 64, "auto"])
def test_tokens_are_those_of_plain_decoding(budget, plain):
    found = generated(speculative_ddtree_budget=budget)
    for law, texts in plain.items():
        assert found[law] == texts, law


def test_what_is_adjusted_and_told_is_that_of_plain_decoding():
    """Penalties count a node's path; log-probabilities are of the same bits of logits."""
    prompts = [[int(x) for x in np.random.default_rng(i).integers(1, 2000, 40)] for i in range(4)]
    shared = {"max_tokens": 96, "ignore_eos": True, "seed": 7, "logprobs": 5}
    params = [
        SamplingParams(temperature=0, frequency_penalty=0.4, **shared),
        SamplingParams(temperature=0.9, repetition_penalty=1.2, logit_bias={5: -100.0}, **shared),
        SamplingParams(temperature=0, presence_penalty=1.0, **shared),
        SamplingParams(temperature=1.0, **shared),
    ]
    found = []
    for options in ({"speculative_algorithm": "NONE"}, {"speculative_ddtree_budget": 16}):
        with LLM(**PAIR, **options) as llm:
            found.append([result.outputs[0] for result in llm.generate(prompts, params)])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        for told, also in zip(one.logprobs, other.logprobs, strict=True):
            assert told.keys() == also.keys()
            for token, item in told.items():
                assert item.logprob == pytest.approx(also[token].logprob, abs=1e-5)
