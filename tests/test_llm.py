"""The Python API refuses what is no prompt and no sampling parameters, by name."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from k26jax import LLM, SamplingParams
from k26jax.errors import RequestError

SHORT = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture(scope="module")
def llm(small_pair, compile_cache):
    with LLM(**small_pair.options) as llm:
        yield llm


def refused(words):
    return pytest.raises(RequestError, match=words)


@pytest.mark.parametrize(
    "prompts", [b"abc", bytearray(b"abc"), 5, None, 1.5, {"a": 1}, {"a"}, np.array(5)]
)
def test_what_holds_no_prompts_is_refused(llm, prompts):
    with refused("prompts is .*expected text, a list of token ids, or a list of those"):
        llm.generate(prompts, SHORT)


@pytest.mark.parametrize("item", [b"abc", 1.5, None, {"a": 1}])
def test_what_is_no_prompt_is_refused(llm, item):
    with refused("prompts hold .*expected text"):
        llm.generate(["a", item], SHORT)
    for call in (llm.stream, llm.request):
        with refused("a prompt is .*expected text or a list of token ids"):
            call(item, SHORT)


@pytest.mark.parametrize("ids", [[1.5], [True], ["a"], [[1]], [None], [np.float32(1)]])
def test_a_list_of_something_else_is_no_prompt(llm, ids):
    assert "expected text or a list of token ids" in llm.generate([ids], SHORT)[0].error
    with refused("a prompt is .*expected text or a list of token ids"):
        llm.generate([ids], SHORT, raise_on_error=True)


@pytest.mark.parametrize(
    "ids", ["abc", b"abc", [[1, 2]], [1.5], 5, None, [True], np.ones((1, 2), int), {1: 2}]
)
def test_logits_are_of_token_ids_alone(llm, ids):
    with refused("token_ids is .*expected a list of token ids"):
        llm.logits(ids)
    with refused("vocabulary"):
        llm.logits([10**6])
    with refused("empty"):
        llm.logits([])


@pytest.mark.parametrize("params", [{"max_tokens": 4}, {}, 5, "greedy", [{"max_tokens": 4}]])
def test_sampling_parameters_are_records(llm, params):
    with refused(r"sampling_params is .*expected SamplingParams\(\.\.\.\)"):
        llm.generate("a", params)
    for call in (llm.stream, llm.request):
        with refused("sampling_params is"):
            call("a", params)


def test_one_set_of_parameters_or_one_each(llm):
    with refused("2 sampling_params for 1 prompts"):
        llm.generate("a", [SHORT, SHORT])
    assert llm.generate([], SHORT) == []


def test_every_form_of_a_prompt_is_the_same_prompt(llm, small_pair):
    text = small_pair.letters[:4]
    ids = small_pair.encode(text)
    (expected,) = llm.generate(text, SHORT)[0].outputs
    for prompts in (
        [text], ids, tuple(ids), np.array(ids), [ids], [np.array(ids, np.int64)],
        np.array([ids]), iter([text]),
    ):  # fmt: skip
        (found,) = llm.generate(prompts, SHORT)
        assert (found.error, found.outputs[0].token_ids) == (None, expected.token_ids)
    np.testing.assert_array_equal(llm.logits(ids), llm.logits(np.array(ids)))


def test_a_full_context_has_logits_too(llm, small_pair):
    size = small_pair.options["context_length"]
    assert llm.logits([2] * size).shape == (size, small_pair.config.vocab_size)
    with refused(f"{size + 1} tokens and the context {size}"):
        llm.logits([2] * (size + 1))


def test_options_are_checked_by_name(small_pair):
    with pytest.raises(TypeError, match="did you mean 'context_length'"):
        LLM("m", context_lenght=5)
    for value in (None, 5, b"m", ""):
        with refused("model_path = .*expected the path of a folder"):
            LLM(value)
    assert inspect.signature(LLM).parameters["max_running_requests"].default == 1
