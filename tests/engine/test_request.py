"""Sampling parameters and requests: what is refused, by what name, and what a request becomes."""

from __future__ import annotations

import dataclasses

import pytest

from k26jax.config import MAX_STOP_IDS
from k26jax.engine.request import SamplingParams, make_request
from k26jax.errors import RequestError


def request(prompt=(1, 2, 3), eos_ids=(7,), seed=5, context_length=10, **params):
    return make_request(
        prompt,
        SamplingParams(**params),
        vocab_size=20,
        context_length=context_length,
        eos_ids=eos_ids,
        seed=seed,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 129), ("n", 1.0), ("n", True),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("temperature", "1"), ("temperature", None), ("temperature", False),
        ("top_k", -2), ("top_k", 1.5), ("top_k", None),
        ("top_p", 0), ("top_p", 0.0), ("top_p", 1.1), ("top_p", -1), ("top_p", float("nan")),
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", []),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2.0), ("max_tokens", True),
        ("seed", 1.5), ("seed", "1"), ("seed", True), ("seed", 1 << 64),
        ("stop", 5), ("stop", [""]), ("stop", ""), ("stop", [1]), ("stop", ["x"] * 17),
        ("stop", {"a": 1}), ("stop", ["\ud800"]),
        ("stop_token_ids", 5), ("stop_token_ids", "5"), ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]), ("stop_token_ids", {"1": 1}), ("stop_token_ids", False),
        ("ignore_eos", "yes"), ("ignore_eos", None), ("ignore_eos", 1),
        ("skip_special_tokens", 0), ("include_stop_str_in_output", "no"),
        ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("prompt_logprobs", 0),
        ("min_tokens", -1), ("min_tokens", None), ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0), ("repetition_penalty", float("inf")),
        ("logit_bias", {1: 101}), ("logit_bias", {-1.5: 1}), ("logit_bias", {"x": 1}),
        ("logit_bias", {"\u0663": 1}), ("logit_bias", [1]), ("logit_bias", {True: 1}),
        ("logit_bias", {"9" * 5000: 1}), ("logit_bias", {"5": 1, "05": 2}),
        ("logit_bias", {5: 1, "5": 1}), ("logit_bias", {1: None}),
        ("logit_bias", dict.fromkeys(range(301), 1)),
        ("bad_words", "word"), ("bad_words", [""]), ("bad_words", [1]), ("bad_words", 5),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_its_fields_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 128), ("temperature", 0), ("temperature", 100), ("top_k", -1), ("top_p", 1),
        ("min_p", 1), ("max_tokens", 1), ("max_tokens", None), ("seed", -(1 << 63)),
        ("seed", (1 << 64) - 1), ("stop", "x"), ("stop", ("x", "y")), ("stop", []),
        ("stop_token_ids", ()), ("stop_token_ids", [0]), ("logprobs", None), ("min_tokens", 0),
        ("repetition_penalty", 0.01), ("logprobs", 0), ("logprobs", 20), ("min_tokens", 1 << 30),
        ("presence_penalty", -2), ("frequency_penalty", 2.0), ("logit_bias", {0: -100, "3": 100}),
        ("logit_bias", dict.fromkeys(range(300), 1.0)), ("bad_words", ()), ("bad_words", ["a"]),
    ],
)  # fmt: skip
def test_the_bounds_themselves_are_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(TypeError, match=r"'max_new_tokens'.*did you mean 'max_tokens'"):
        SamplingParams(max_new_tokens=3)


def test_stop_strings_are_a_list_whatever_was_given():
    assert SamplingParams().stop_strings == []
    assert SamplingParams(stop="ab").stop_strings == ["ab"]
    assert SamplingParams(stop=("a", "b")).stop_strings == ["a", "b"]


def test_a_request_keeps_prompt_and_seed():
    assert request().prompt_token_ids == (1, 2, 3)
    assert request().seed == 5
    chosen = make_request(
        [1],
        SamplingParams(seed=0),
        vocab_size=2,
        context_length=9,
        eos_ids=(),
        seed=5,
    )
    assert chosen.seed == 0


@pytest.mark.parametrize(
    ("asked", "given"), [(None, 7), (7, 7), (8, 7), (6, 6), (1, 1), (1 << 30, 7)]
)
def test_tokens_to_generate_end_where_the_context_does(asked, given):
    assert request(max_tokens=asked).max_tokens == given


def test_stop_ids_are_the_own_ones_then_the_models_each_once():
    assert request(eos_ids=(7, 8)).stop_ids == (7, 8)
    assert request(eos_ids=(7, 8), stop_token_ids=[3, 7, 3]).stop_ids == (3, 7, 8)
    assert request(eos_ids=(7,), stop_token_ids=[3], ignore_eos=True).stop_ids == (3,)
    assert request(ignore_eos=True).stop_ids == ()


def test_what_changes_logits_is_told_from_what_does_not():
    for params in (
        {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1},
        {"logit_bias": {1: 1}}, {"min_tokens": 1},
    ):  # fmt: skip
        assert request(**params).adjusts, params
        assert request(**params).has_extras
    assert not request().has_extras
    # Without an end token there is nothing to hold back.
    assert not request(min_tokens=1, ignore_eos=True).adjusts
    told = request(logprobs=0)
    assert (told.adjusts, told.has_extras) == (False, True)


def test_min_tokens_are_no_more_than_max_tokens():
    with pytest.raises(RequestError, match="min_tokens = 4 exceeds max_tokens = 3"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert request(min_tokens=9).max_tokens == 7


def test_too_many_stop_ids_are_refused_with_both_numbers():
    own = list(range(MAX_STOP_IDS))
    assert len(request(stop_token_ids=own).stop_ids) == MAX_STOP_IDS
    with pytest.raises(RequestError, match=f"{MAX_STOP_IDS + 1} stop.*at most {MAX_STOP_IDS}"):
        request(stop_token_ids=own, eos_ids=(19,))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1, 20)}, "prompt.*20.*vocabulary of 20"),
        ({"prompt": (-1,)}, "prompt.*-1"),
        ({"stop_token_ids": [20]}, "stop_token_ids.*20"),
        ({"logit_bias": {"20": 1}}, "logit_bias.*20.*vocabulary of 20"),
        ({"prompt": (1,) * 10}, "10 tokens.*context 10"),
        ({"prompt": (1,) * 99}, "99 tokens.*context 10"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_the_numbers(changes, words):
    with pytest.raises(RequestError, match=words):
        request(**changes)


def test_a_prompt_that_leaves_one_token_of_room_is_taken():
    assert request(prompt=(1,) * 9).max_tokens == 1


def test_sampling_parameters_are_values():
    params = SamplingParams(seed=1)
    assert dataclasses.replace(params, seed=1) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 2
