"""Answers of a given shape through the engine: the tokens of plain decoding, allowed ones alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from k26jax import LLM, SamplingParams
from k26jax.errors import RequestError


@pytest.fixture(scope="module")
def llm(small_pair, compile_cache):
    with LLM(**small_pair.options) as llm:
        yield llm


@pytest.fixture(scope="module")
def shapes(small_pair) -> list[dict | None]:
    a, b, *rest = small_pair.letters[:12]
    half = "".join(small_pair.letters[::2])
    return [
        {"regex": f"[{half}]{{8}}"},
        {"choice": [a * 3, a + b + a, "".join(rest)]},
        None,
        {"regex": f"({a}{b}|[{half}]{{2}}){{4,6}}"},
    ]


def asks(shapes, small_pair):
    prompts, params = [], []
    for number, shape in enumerate(shapes):
        for hot in (0.0, 1.0):
            prompts.append(small_pair.letters[number : number + 5])
            params.append(
                SamplingParams(
                    temperature=hot, seed=number, top_k=20 if number % 2 else 0, max_tokens=16,
                    structured_outputs=shape,
                )
            )  # fmt: skip
    return prompts, params


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def is_of(shape: dict, text: str) -> bool:
    words = "|".join(map(re.escape, shape.get("choice", [])))
    return re.fullmatch(shape.get("regex", words), text) is not None


def test_answers_are_of_their_shapes(llm, shapes, small_pair):
    prompts, params = asks(shapes, small_pair)
    found = llm.generate(prompts, params, raise_on_error=True)
    for output, asked in zip(found, params, strict=True):
        (only,) = output.outputs
        if asked.structured_outputs is not None:
            assert only.finish_reason == "stop"
            assert is_of(asked.structured_outputs, only.text)
            assert only.token_ids[-1] in small_pair.config.eos_token_ids
    # Drafts were taken, so the masks of inner nodes were in use.
    lengths = [n for output in found for n in output.outputs[0].metrics.accept_lengths]
    assert max(lengths) > 2


def test_greedy_tokens_are_the_best_allowed_ones_of_a_forward_each(llm, shapes, small_pair):
    """Plain decoding, the slow way: the target's logits, the grammar's mask, the largest."""
    grammars = llm.engine.loaded.grammars
    for shape in (shapes[0], shapes[1], shapes[3]):
        params = SamplingParams(temperature=0, structured_outputs=shape)
        ids = small_pair.encode(small_pair.letters[:5])
        (output,) = llm.generate([ids], params)
        guide, expected = grammars.guide(shape), []
        while not expected or expected[-1] not in small_pair.config.eos_token_ids:
            masks = np.zeros((1, grammars.words), np.uint32)
            grammars.fill(guide.collect([0], [-1], masks, 0), masks)
            bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
            logits = llm.logits(ids + expected)[-1]
            expected.append(int(np.where(bits[: len(logits)], logits, -np.inf).argmax()))
            guide.advance(expected[-1:])
        assert output.outputs[0].token_ids == expected


def test_answers_beside_them_are_what_they_are_alone(llm, shapes, small_pair):
    prompts, params = asks(shapes, small_pair)
    together = tokens(llm.generate(prompts, params))
    alone = [tokens(llm.generate(*pair))[0] for pair in zip(prompts, params, strict=True)]
    assert together == alone


def test_forbidden_nodes_are_in_the_trees_and_are_not_accepted(llm, small_pair):
    half = small_pair.letters[::2]
    params = SamplingParams(
        temperature=1, seed=5, max_tokens=30, structured_outputs={"regex": f"[{half}]{{20}}"}
    )
    allowed = {*small_pair.encode(half), *small_pair.config.eos_token_ids}
    tried, taken, lengths = set(), set(), []
    for chunk in llm.stream(small_pair.letters[:6], params, trace=True):
        taken |= {*chunk.token_ids}
        for trace in chunk.traces:
            nodes = [trace.token_ids[row] for row in trace.path[1:]]
            assert nodes == chunk.token_ids[: len(nodes)]
            lengths.append(len(trace.path))
            tried |= {*trace.token_ids[1:]}
    assert taken <= allowed
    assert tried - allowed
    assert max(lengths) > 1
    assert len(lengths) < 20


def test_a_stream_that_is_left_leaves_no_grammar(llm, shapes, small_pair):
    free = SamplingParams(temperature=0, max_tokens=8)
    expected = tokens(llm.generate(small_pair.letters[:4], free))
    stream = llm.stream(
        small_pair.letters[:4],
        SamplingParams(temperature=0, max_tokens=8, structured_outputs=shapes[0]),
    )
    next(stream)
    assert llm.engine.runner._guiding.is_needed
    stream.close()
    assert not llm.engine.runner._guiding.is_needed
    assert tokens(llm.generate(small_pair.letters[:4], free)) == expected


def test_several_sequences_each_have_their_place(llm, small_pair):
    words = [small_pair.letters[i : i + 3] for i in range(0, 12, 3)]
    params = SamplingParams(n=4, seed=1, temperature=2, structured_outputs={"choice": words})
    (output,) = llm.generate(small_pair.letters[:4], params)
    assert {only.text for only in output.outputs} <= {*words}
    assert {only.finish_reason for only in output.outputs} == {"stop"}


def test_biases_and_log_probabilities_go_with_a_shape(llm, small_pair):
    half = small_pair.letters[::2]
    favoured, foreign = small_pair.encode(half[3])[0], small_pair.encode(small_pair.letters[1])[0]
    params = SamplingParams(
        temperature=0, structured_outputs={"regex": f"[{half}]{{6}}"}, logprobs=1,
        logit_bias={favoured: 60.0, foreign: 100.0},
    )  # fmt: skip
    (found,) = llm.generate(small_pair.letters[:4], params)[0].outputs
    assert found.text == half[3] * 6
    assert [next(iter(told)) for told in found.logprobs] == found.token_ids
    # They are the target's own: what the grammar forbids may be likelier.
    assert max(next(iter(told.values())).rank for told in found.logprobs) > 1
    for name, value in (("min_tokens", 2), ("bad_words", ["a"])):
        with pytest.raises(RequestError, match=f"{name} does not go with structured_outputs"):
            SamplingParams(structured_outputs={"regex": "a"}, **{name: value})


def test_what_cannot_be_is_refused_before_it_runs(llm):
    params = SamplingParams(structured_outputs={"regex": "("})
    assert "structured_outputs: " in llm.generate("a", params)[0].error
    with pytest.raises(RequestError, match="ignore_eos does not go with structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)
    with pytest.raises(RequestError, match=r"structured_outputs\.regx .* did you mean 'regex'"):
        SamplingParams(structured_outputs={"regx": "a"})
