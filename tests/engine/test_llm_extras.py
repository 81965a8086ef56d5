"""Log-probabilities, penalties, biases and masks through `LLM`, with a drafter and without."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from k26jax import LLM, SamplingParams
from k26jax.engine.cluster import _begin
from k26jax.engine.logprobs import LOWEST, Logprob, read_logprobs
from k26jax.engine.request import make_request, spellings
from k26jax.errors import RequestError

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SEEDED = {"temperature": 1.3, "seed": 11, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(small_pair, compile_cache):
    pages = {"enable_prefix_caching": True, "prefix_cache_tokens": 96}
    with LLM(**small_pair.options | pages) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(llm):
    return llm.without_drafter()


@pytest.fixture(scope="module")
def prompts(small_pair) -> list[str]:
    return [small_pair.letters[:4], small_pair.letters[3:9]]


def outputs(llm, prompts, *params):
    return [result.outputs[0] for result in llm.generate(prompts, list(params))]


def test_who_asks_for_nothing_runs_the_programs_without_extras(plain, prompts):
    outputs(plain, prompts, SamplingParams(**GREEDY), SamplingParams(**SEEDED))
    assert not {"extra_steps", "adjust"} & plain.engine.runner._compiled.keys()


@pytest.mark.parametrize("settings", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_with_a_drafter_the_tokens_are_those_of_plain_decoding(llm, plain, prompts, settings):
    """And one that asks for nothing beside one that does keeps its tokens."""
    letter = prompts[0][0]
    bare = outputs(plain, prompts, *[SamplingParams(**settings)] * 2)
    for extras in (
        {"presence_penalty": 1.5, "repetition_penalty": 1.4},
        {"frequency_penalty": 0.8, "logit_bias": {3: 5.0, 4: -100.0}},
        {"bad_words": [letter * 2, bare[0].text[:1], bare[0].text[3:6]], "logprobs": 2},
    ):
        asked = SamplingParams(**settings, **extras), SamplingParams(**settings)
        found = outputs(llm, prompts, *asked)
        want = outputs(plain, prompts, *asked)
        assert [output.token_ids for output in found] == [output.token_ids for output in want]
        assert found[0].token_ids != bare[0].token_ids
        assert found[1].token_ids == bare[1].token_ids
        assert any(length > 1 for length in found[0].metrics.accept_lengths)


def test_log_probabilities_are_those_of_the_logits(llm, plain, small_pair, prompts):
    """Settings change which tokens come, not what is told of them; to 1e-4 in float32."""
    for settings in (GREEDY, SEEDED | {"presence_penalty": 1.0, "top_k": 5}):
        asked = [SamplingParams(**settings, logprobs=count) for count in (3, 0)]
        found, want = outputs(llm, prompts, *asked), outputs(plain, prompts, *asked)
        for prompt, count, output, other in zip(prompts, (3, 0), found, want, strict=True):
            ids = [*small_pair.encode(prompt), *output.token_ids]
            rows = np.asarray(jax.nn.log_softmax(llm.logits(ids[:-1])))[len(prompt) - 1 :]
            assert len(output.logprobs) == len(output.token_ids) == len(rows)
            for row, token, told, also in zip(
                rows, output.token_ids, output.logprobs, other.logprobs, strict=True
            ):
                assert next(iter(told)) == token
                assert len(told) in (count, count + 1)
                assert {1, *range(1, count + 1)} <= {item.rank for item in told.values()} | {1}
                for id, item in told.items():
                    assert item.logprob == pytest.approx(row[id], abs=1e-4)
                    assert item.logprob == pytest.approx(also[id].logprob, abs=1e-4)
                    assert item.rank == 1 + (row > row[id]).sum()
                    assert item.decoded_token == (small_pair.decode([id]) or f"<end{id}>")


def test_a_stream_tells_the_same_and_shows_where_tokens_begin(llm, prompts):
    params = SamplingParams(**GREEDY, logprobs=1)
    (whole,) = outputs(llm, prompts[:1], params)
    chunks = list(llm.stream(prompts[0], params))
    assert [item for chunk in chunks for item in chunk.logprobs] == whole.logprobs
    assert chunks[-1].output.logprobs == whole.logprobs
    shown = [place for chunk in chunks for place in chunk.shown]
    assert [whole.text[start] for _, start in shown] == list(whole.text)
    record = json.loads(json.dumps(whole.record(3), allow_nan=False))
    assert [items[0]["token_id"] for items in record["logprobs"]] == whole.token_ids
    assert record["logprobs"][0][0].keys() == {"token_id", "logprob", "rank", "decoded_token"}
    assert "logprobs" not in outputs(llm, prompts[:1], SamplingParams(**GREEDY))[0].record(3)


def test_whose_trees_are_recorded_is_told_too(llm, prompts, monkeypatch):
    runner, names = llm.engine.runner, []
    found = runner._program
    monkeypatch.setattr(runner, "_program", lambda name: names.append(name) or found("extra_steps"))
    runner._with_extras.add(0)
    runner.run(1, record_trees=True)
    runner._with_extras.clear()
    assert names == ["traced_extra_steps"]


def test_log_probabilities_end_where_the_output_does(llm, prompts):
    (whole,) = outputs(llm, prompts[:1], SamplingParams(**GREEDY))
    stop = whole.text[5:7]
    (cut,) = outputs(llm, prompts[:1], SamplingParams(**GREEDY, stop=stop, logprobs=0))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(cut.logprobs) == len(cut.token_ids) == len(cut.text) + 2


def test_bad_words_are_not_written(llm, small_pair, prompts):
    (whole,) = outputs(llm, prompts[:1], SamplingParams(**GREEDY))
    words = [whole.text[1:3], whole.text[6:7]]
    (found,) = outputs(llm, prompts[:1], SamplingParams(**GREEDY, bad_words=words))
    for word in words:
        ids = small_pair.encode(word)
        runs = [found.token_ids[i : i + len(ids)] for i in range(len(found.token_ids))]
        assert ids not in runs
        assert ids in [whole.token_ids[i : i + len(ids)] for i in range(len(whole.token_ids))]
    assert len(found.token_ids) == len(whole.token_ids)


def test_min_tokens_hold_back_stop_ids_and_stop_strings(llm, plain, prompts):
    (whole,) = outputs(llm, prompts[:1], SamplingParams(**GREEDY))
    token, letter = whole.token_ids[2], whole.text[2]
    asked = GREEDY | {"stop_token_ids": [token]}
    (early,) = outputs(llm, prompts[:1], SamplingParams(**asked))
    assert (early.finish_reason, early.token_ids[-1]) == ("stop", token)
    later = SamplingParams(**asked, min_tokens=8)
    (found,), (other,) = outputs(llm, prompts[:1], later), outputs(plain, prompts[:1], later)
    assert token not in found.token_ids[:8]
    assert len(found.token_ids) >= 8
    assert found.token_ids == other.token_ids
    # A stop string ends nothing before; which tokens come does not change.
    params = SamplingParams(**GREEDY, stop=letter, min_tokens=4)
    (found,) = outputs(llm, prompts[:1], params)
    assert found.text[:4] == whole.text[:4]
    assert found.text == whole.text[: 4 + (whole.text[4:] + letter).index(letter)]


def test_a_slot_keeps_nothing_of_its_last_request(llm, prompts):
    before = outputs(llm, prompts, *[SamplingParams(**SEEDED)] * 2)
    outputs(llm, prompts, *[SamplingParams(**SEEDED, frequency_penalty=2, logprobs=1)] * 2)
    adjusted = SamplingParams(**SEEDED, presence_penalty=2.0)
    once = outputs(llm, prompts, adjusted, SamplingParams(**SEEDED))
    again = outputs(llm, prompts, adjusted, SamplingParams(**SEEDED))
    assert [o.token_ids for o in once] == [o.token_ids for o in again]
    assert again[1].token_ids == before[1].token_ids
    assert again[1].logprobs is None


def test_a_request_reaches_other_processes_whole():
    """It travels as JSON, whose names are strings."""
    params = SamplingParams(logit_bias={3: 1.5}, bad_words=["a"], logprobs=2, min_tokens=1)
    request = make_request(
        [1, 2], params, vocab_size=9, context_length=9, eos_ids=(7,), seed=3, bad_words=[[4, 5]]
    )
    told = json.loads(json.dumps(dataclasses.asdict(request)))
    heard = []
    _begin(SimpleNamespace(begin=lambda slot, request: heard.append(request)), 0, told)
    assert heard[0].params.biases == {3: 1.5}
    assert heard[0].bad_words == ((4, 5),)
    assert heard[0].adjusts
    assert heard[0].stop_ids == request.stop_ids


def test_spellings_with_a_space_are_kept_where_they_are_other_tokens():
    table = {"word": [5, 6], " word": [9], "x": [7], " x": [1, 7], " ": [1], "  ": [1, 1]}
    assert spellings(["word", "x", " word"], table.get) == [[5, 6], [9], [7]]
    with pytest.raises(RequestError, match="bad_words has 'long', which is 17 tokens; at most 16"):
        spellings(["long"], lambda text: [2] * 17)
    with pytest.raises(RequestError, match="65 words with 65 spellings, at most 64"):
        spellings([str(i) for i in range(65)], lambda text: [int(text)])


def test_what_json_cannot_hold_is_told_as_the_lowest():
    for value in (-np.inf, np.nan, -20000.0):
        found = read_logprobs((1, value, 2, [4, 1], [-0.5, value]), 2, None)
        assert found == {1: Logprob(LOWEST, 2, None), 4: Logprob(-0.5, 1, None)}


def test_a_prompt_from_the_prefix_cache_counts_for_the_repetition_penalty(llm, small_pair):
    """What is in the prompt is told by the request, not by what is computed of it."""
    prompt = (small_pair.letters * 40)[:40]
    params = SamplingParams(temperature=0, repetition_penalty=2.5, max_tokens=12, logprobs=0)
    results = [llm.generate(prompt, params)[0] for _ in range(2)]
    one, other = (result.outputs[0] for result in results)
    assert [result.cached_tokens > 0 for result in results] == [False, True]
    assert one.token_ids == other.token_ids
    bare = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    assert bare.token_ids != one.token_ids
