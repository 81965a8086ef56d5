"""One run at a time has the slots: others are refused, and every way a run ends frees them."""

from __future__ import annotations

import gc

import pytest

from k26jax import LLM, SamplingParams
from k26jax.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(small_pair, compile_cache):
    with LLM(**small_pair.options) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(small_pair) -> list[str]:
    return [small_pair.letters[:4], small_pair.letters[3:9]]


@pytest.fixture(scope="module")
def expected(llm, prompts) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def tokens_of(chunks) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def refused():
    return pytest.raises(RequestError, match=r"another run .* finish or close it first")


def is_free(llm, prompts, expected) -> bool:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)] == expected


@pytest.mark.parametrize(
    "other",
    [
        lambda llm, prompt: llm.generate(prompt, GREEDY),
        lambda llm, prompt: llm.logits([1, 2, 3]),
        lambda llm, prompt: llm.stream(prompt, GREEDY),
        lambda llm, prompt: llm.stream(prompt, GREEDY, trace=True),
        lambda llm, prompt: list(llm.engine.run([llm.request(prompt, GREEDY)])),
    ],
    ids=["generate", "logits", "stream", "traced stream", "run"],
)
def test_a_stream_goes_on_after_what_was_refused_beside_it(llm, prompts, expected, other):
    stream = llm.stream(prompts[0], GREEDY)
    first = [next(stream), next(stream)]
    for _ in range(2):
        with refused():
            other(llm, prompts[1])
    assert tokens_of([*first, *stream]) == expected[0]
    assert is_free(llm, prompts, expected)


def test_of_two_streams_the_one_read_first_has_the_slots(llm, prompts, expected):
    """Made before either is read, they may be read one after the other, but not in turns."""
    one, other = llm.stream(prompts[0], GREEDY), llm.stream(prompts[1], GREEDY)
    chunks = [next(one)]
    with refused():
        next(other)
    assert tokens_of([*chunks, *one]) == expected[0]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    assert [tokens_of(stream) for stream in streams] == expected


def test_what_is_refused_takes_no_seed(llm, prompts):
    params = SamplingParams()
    seed = llm.request(prompts[0], params).seed
    stream = llm.stream(prompts[0], GREEDY)
    next(stream)
    for call in (llm.generate, llm.stream):
        with refused():
            call(prompts[1], params)
    stream.close()
    assert llm.request(prompts[0], params).seed == seed + 2


def test_a_stream_that_is_closed_or_forgotten_frees_the_slots(llm, prompts, expected):
    for unread in (True, False):
        for end in ("close", "forget"):
            stream = llm.stream(prompts[0], GREEDY)
            if not unread:
                next(stream)
            if end == "close":
                stream.close()
            else:
                del stream
                gc.collect()
            assert is_free(llm, prompts, expected)


def test_a_run_that_fails_frees_the_slots(llm, prompts, expected):
    def requests():
        yield llm.request(prompts[0], GREEDY)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(llm.engine.run(requests()))
    assert is_free(llm, prompts, expected)


@pytest.mark.parametrize("name", ["prefill_16", "steps", "release", "logits_16"])
def test_ctrl_c_in_a_program_loses_that_run_alone(llm, prompts, expected, name):
    """The program has taken the state, which is donated, and its result is never bound."""
    runner = llm.engine.runner
    program = runner._program(name)

    def interrupted(*arguments):
        program(*arguments)
        raise KeyboardInterrupt

    runner._compiled[name] = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.logits([1, 2]) if "logits" in name else llm.generate(prompts, GREEDY)
    finally:
        runner._compiled[name] = program
    assert is_free(llm, prompts, expected)


def test_busy_slots_of_which_the_device_knows_nothing_end_the_run(llm, prompts, expected):
    runner = llm.engine.runner
    run = runner.run
    runner.run = lambda limit, **options: run(0, **options)
    try:
        with pytest.raises(AssertionError, match="idle on the device"):
            llm.generate(prompts, GREEDY)
    finally:
        del runner.run
    assert is_free(llm, prompts, expected)


def test_leaving_with_a_stream_half_read(small_pair, compile_cache, prompts):
    """Bug: the stream released its slot on an engine that was gone, with a message at its end."""
    with LLM(**small_pair.options) as llm:
        streams = [llm.stream(prompts[0], GREEDY) for _ in range(2)]
        next(streams[0])
    for stream in streams:
        with pytest.raises(RequestError, match="was shut down"):
            next(stream)
    with LLM(**small_pair.options) as llm:
        stream = llm.stream(prompts[0], GREEDY)
        next(stream)
    del stream
    gc.collect()
    with pytest.raises(RequestError, match="was shut down"):
        llm.generate(prompts[0])
