"""The trained pair in checkpoints/: what it must show, through the Python API."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
from fixtures.paths import REPOSITORY

from k26jax import LLM, SamplingParams

CHECKPOINTS = REPOSITORY / "checkpoints"
TARGET, DRAFTER = str(CHECKPOINTS / "k26-tiny"), str(CHECKPOINTS / "k26-tiny-dflash")
GREEDY = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    lines = (CHECKPOINTS / "heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="module")
def plain() -> LLM:
    with LLM(TARGET, max_running_requests=4, context_length=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def ddtree() -> LLM:
    with LLM(
        TARGET,
        speculative_draft_model_path=DRAFTER,
        speculative_ddtree_budget=16,
        max_running_requests=4,
        context_length=512,
    ) as llm:
        yield llm


@pytest.mark.slow
def test_bits_per_byte_on_held_out_text(plain, prompts, capsys):
    """The target has learnt Python: well under the 8 bits of a byte, and the 3 to 4 of a guess."""
    bits = size = 0
    for prompt in prompts:
        ids = plain.encode(prompt)
        logits = plain.logits(ids).astype(np.float64)[:-1]
        log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))[:, None]
        log_probs -= logits.max(-1, keepdims=True)
        bits -= log_probs[np.arange(len(ids) - 1), ids[1:]].sum() / math.log(2)
        size += len(prompt.encode())
    with capsys.disabled():
        print(f"\nheld-out prompts: {bits / size:.3f} bits per byte")
    assert bits / size < 2.0


def test_ddtree_gives_the_tokens_of_plain_decoding_in_a_third_of_the_forwards(
    plain, ddtree, prompts, capsys
):
    """Twenty held-out prompts of 128 greedy tokens: the same tokens, at least 3.5 a forward."""
    expected = [output.outputs[0] for output in plain.generate(prompts, GREEDY)]
    found = [output.outputs[0] for output in ddtree.generate(prompts, GREEDY)]
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert all(output.text for output in found)
    lengths = [output.metrics.accept_length for output in found]
    with capsys.disabled():
        print(f"\nbudget 16: {np.mean(lengths):.2f} tokens per target forward")
    assert all(output.metrics.accept_length == 1 for output in expected)
    assert np.mean(lengths) >= 3.5


@pytest.mark.slow
def test_seeded_sampling_gives_the_same_text_too(plain, ddtree, prompts):
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, max_tokens=40, seed=number)
        for number in range(6)
    ]
    texts = [
        [output.outputs[0].text for output in llm.generate(prompts[:6], params)]
        for llm in (plain, ddtree)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 6


@pytest.mark.slow
def test_answers_of_a_shape_are_those_of_plain_decoding(plain, ddtree, prompts):
    """Greedy and seeded, schemas and patterns, beside one that is free."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["cat", "dog"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
        },
        "required": ["name", "kind", "tags"],
        "additionalProperties": False,
    }
    shapes = [{"json": schema}, {"regex": "[a-z]+ = [0-9]{3}"}, None]
    params = [
        SamplingParams(temperature=hot, seed=5, max_tokens=200, structured_outputs=shape)
        for shape in shapes
        for hot in (0.0, 0.8)
    ]
    found = [llm.generate(prompts[:6], params, raise_on_error=True) for llm in (plain, ddtree)]
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in found]
    assert tokens[0] == tokens[1]
    for output in found[1][:2]:
        assert json.loads(output.outputs[0].text)["kind"] in ("cat", "dog")
    assert max(output.metrics.accept_length for output in found[1][:4]) > 1.2


@pytest.mark.slow
def test_streamed_text_is_the_generated_text(ddtree, prompts):
    params = SamplingParams(temperature=0, max_tokens=60, stop=["\n\n"])
    output = ddtree.generate(prompts[3], params)[0].outputs[0]
    chunks = list(ddtree.stream(prompts[3], params, trace=True))
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert [i for chunk in chunks for i in chunk.token_ids] == output.token_ids
    assert chunks[-1].output.text == output.text
    assert chunks[-1].finish_reason == output.finish_reason
    for chunk in chunks[1:]:
        (trace,) = chunk.traces
        assert trace.path[0] == 0
        assert len(chunk.token_ids) <= len(trace.path)


def test_after_warm_up_nothing_compiles_and_dispatches_are_few(ddtree, prompts):
    """Invariant 6: compilations counted by JAX itself; eight steps a dispatch."""
    compiled: list[str] = []
    listener = lambda name, _seconds, **_: compiled.append(name)  # noqa: E731
    ddtree.generate(prompts[0], SamplingParams(temperature=0, max_tokens=2))
    runner, dispatches = ddtree.engine.runner, []
    run = runner.run
    runner.run = lambda *args, **kwargs: dispatches.append(1) or run(*args, **kwargs)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        output = ddtree.generate(prompts[1], GREEDY)[0]
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
        del runner.run
    assert not [name for name in compiled if "compile" in name]
    assert len(dispatches) == -(-output.metrics.target_forwards // 8)


def test_one_bad_prompt_does_not_lose_the_others(ddtree, prompts):
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = ddtree.generate([prompts[0], "", [1, 2, 99999], "x" * 5000, [5, 6]], params)
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    assert "empty" in outputs[1].error
    assert "99999" in outputs[2].error
    assert "512" in outputs[3].error
    assert [len(output.outputs) for output in outputs] == [1, 0, 0, 0, 1]
