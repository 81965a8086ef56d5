"""A prompt that begins like an earlier one gives what it gives alone, bit for bit, for less."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k26jax import LLM, SamplingParams
from k26jax.config import EngineConfig
from k26jax.engine import loading, memory
from k26jax.engine.cluster import _CALLS, LeadingRunner
from k26jax.engine.loading import load, prepare
from k26jax.engine.memory import tree_bytes
from k26jax.engine.runner import Runner
from k26jax.engine.scheduler import Ended, Scheduler
from k26jax.errors import BusyError, CapacityError

PAGE = 16
KINDS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 3},
}
PAGES = {"enable_prefix_caching": True, "prefix_cache_tokens": 6 * PAGE}
pytestmark = pytest.mark.usefixtures("compile_cache")


def params(kind: str = "greedy", max_tokens: int = 12, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **KINDS[kind], **more)


@pytest.fixture(scope="module")
def pair(small_pair, compile_cache):
    """The same model without and with a prefix cache of six pages."""
    with LLM(**small_pair.options) as cold, LLM(**small_pair.options | PAGES) as warm:
        yield SimpleNamespace(cold=cold, warm=warm)


@pytest.fixture(autouse=True)
def adds_up(request):
    """After every test no prompt holds a page, and a flush leaves the next one nothing."""
    yield
    if "pair" in request.fixturenames:
        runner = request.getfixturevalue("pair").warm.engine.runner
        if runner._state is not None:
            runner.pages.check_idle()
            runner.flush()


def prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 16, count).tolist()


def check_same(pair, ids: list[int], kind: str = "greedy") -> int:
    """Generates without and with the prefix cache; returns the tokens that came from there."""
    (cold,), (warm,) = (
        llm.generate([ids], params(kind), raise_on_error=True) for llm in (pair.cold, pair.warm)
    )
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert warm.metrics.accept_lengths == cold.metrics.accept_lengths
    assert cold.cached_tokens == 0
    return warm.cached_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_leaves_the_bits_of_the_prefill_it_saves(small_pair, dtype):
    """Bug 53: both caches, in a slot that another prompt has used in between."""
    ids = prompt(0, 45)
    options = small_pair.options | {"dtype": dtype}
    rows = []
    for more, earlier in (({}, []), (PAGES, [ids[:33], prompt(1, 50), ids])):
        runner = Runner(load(prepare(EngineConfig(**options | more))))
        runner.restore()
        for tokens in [*earlier, ids]:
            runner.release(0)
            first = runner.prefill(0, runner._loaded.request(tokens, params("seeded")))
        rows.append((first, jax.device_get((runner.state.cache, runner.state.draft_cache))))
    assert runner.cached_tokens(0) == 2 * PAGE
    assert rows[0][0] == rows[1][0]
    for cold, warm in zip(*map(jax.tree.leaves, (rows[0][1], rows[1][1])), strict=True):
        one, other = (np.ascontiguousarray(x[:, 0, : len(ids)]) for x in (cold, warm))
        assert one.tobytes() == other.tobytes()
        assert np.any(one != 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_prefills_what_is_new(pair, kind):
    """Bugs 54, 57: each turn resends the one before, its answer and a question."""
    ids, seen = prompt(2, 21), 0
    for turn in range(4):
        cached = check_same(pair, ids, kind)
        assert cached >= max(seen - PAGE, 0)
        assert cached % PAGE == 0
        assert (cached > 0) == (turn > 0)
        seen = len(ids)
        (answer,) = pair.cold.generate([ids], params(kind, max_tokens=6))
        ids = ids + answer.outputs[0].token_ids + prompt(turn, 3)


def test_what_was_generated_is_not_kept(pair):
    """A decoding step's rows have other bits than a prefill's: see docs/server.md."""
    ids = prompt(3, 2 * PAGE)
    (output,) = pair.warm.generate([ids], params(max_tokens=24))
    check_same(pair, ids + output.outputs[0].token_ids)
    assert pair.warm.engine.runner.pages.kept == 3
    pair.warm.engine.runner.flush()
    check_same(pair, ids)
    assert check_same(pair, [*ids, 5]) == 2 * PAGE


def test_the_sequences_of_one_prompt_share_its_prefill(pair):
    ids = prompt(4, 40)
    outputs = [
        llm.generate([ids], params("seeded", n=3))[0].outputs for llm in (pair.cold, pair.warm)
    ]
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
    assert [o.metrics.cached_tokens for o in outputs[1]] == [0, 32, 32]


@settings(max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(0, 1)), max_size=5))
def test_any_prompts_in_any_order(pair, asked):
    """Prompts that part at any token, at and beside the pages' borders; more than there is room."""
    for stem, count, end in asked:
        ids = [*prompt(stem, count), end + 2]
        assert check_same(pair, ids, ("greedy", "seeded")[end]) < len(ids)
        pair.warm.engine.runner.pages.check_idle()


def test_many_at_once_with_aborts(pair):
    """Through the scheduler: tokens of each alone; when it is idle nothing is held (bug 55)."""
    stems = [prompt(stem, 34) for stem in range(3)]
    asked = [
        (stems[number % 3] + prompt(number, 1 + number), ("greedy", "seeded")[number % 2])
        for number in range(16)
    ]
    expected = [
        pair.cold.generate([ids], params(kind))[0].outputs[0].token_ids for ids, kind in asked
    ]
    found: list[list[int]] = [[] for _ in asked]
    cached, ended = [0] * len(asked), [threading.Event() for _ in asked]

    def deliver(number):
        def take(item):
            if isinstance(item, Ended):
                ended[number].set()
                return
            found[number] += item.token_ids
            cached[number] = item.cached_tokens
            if item.output is not None:
                ended[number].set()

        return take

    scheduler = Scheduler(pair.warm.engine)
    scheduler.start()
    jobs = [
        scheduler.submit([pair.warm.request(ids, params(kind))], [deliver(number)])[0]
        for number, (ids, kind) in enumerate(asked)
    ]
    with pytest.raises(BusyError, match="the prefix cache is flushed while none does"):
        scheduler.flush()
    for job in jobs[5::4]:
        scheduler.abort(job)
    assert all(event.wait(60) for event in ended)
    for number, job in enumerate(jobs):
        assert found[number] == expected[number][: len(found[number])]
        assert job.outcome == "abort" or found[number] == expected[number]
    assert sum(job.outcome == "length" for job in jobs) >= 12
    assert sum(count == 32 for count in cached) >= 6
    assert scheduler.wait_idle(10)
    kept, room = scheduler.kept_tokens
    assert (kept, room) == (6 * PAGE, 6 * PAGE)
    assert scheduler.flush() == kept
    assert scheduler.kept_tokens[0] == 0
    assert scheduler.flush() == 0
    assert scheduler.close()
    assert scheduler.error is None


@pytest.mark.parametrize("name", ["keep_page", "take_pages", "prefill_16"])
def test_ctrl_c_in_a_program_loses_no_page_and_keeps_no_wrong_one(pair, name):
    runner, ids = pair.warm.engine.runner, prompt(5, 40)
    check_same(pair, ids[:20])
    program = runner._program(name)

    def interrupted(*arguments):
        program(*arguments)
        raise KeyboardInterrupt

    runner._compiled[name] = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            pair.warm.generate([ids], params())
    finally:
        runner._compiled[name] = program
    runner.pages.check_idle()
    check_same(pair, ids)
    assert check_same(pair, ids) == 2 * PAGE


def kept_in(runner: Runner) -> list:
    """Pages with their tokens and the pages before them, from least to most recently used."""
    assert runner.pages is not None
    nodes = runner.pages._kept.values()
    return [(node.page, node.key, node.parent and node.parent.page) for node in nodes]


def test_the_other_processes_of_a_run_keep_the_same_pages(pair):
    """What process 0 tells is enough: the same calls on another runner leave the same pages."""
    calls = []

    class Told:
        """Stands for the cluster: notes the calls."""

        def call(self, name, arguments):
            calls.append((name, arguments))
            return contextlib.nullcontext()

    loaded = pair.warm.engine.loaded
    told: Any = Told()
    leader, follower = LeadingRunner(loaded, told), Runner(loaded)
    for runner in (leader, follower):
        runner._compiled.update(pair.warm.engine.runner._compiled)
        runner.restore()
    ids = prompt(6, 34)
    for slot, length in ((0, 20), (1, 34), (0, 25)):
        leader.release(slot)
        leader.prefill(slot, pair.warm.request(ids[:length], params()))
    leader.release(1)
    leader.begin(1, pair.warm.request(prompt(7, 40), params()))
    leader.prefill_next(1)
    for slot in range(2):
        leader.release(slot)
    assert leader.flush() == 3 * PAGE
    leader.prefill(0, pair.warm.request(ids, params()))
    for name, arguments in calls:
        _CALLS[name](follower, **arguments)
    kept = [kept_in(runner) for runner in (leader, follower)]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2
    both = [jax.tree.leaves(jax.device_get(runner.state)) for runner in (leader, follower)]
    assert all(np.array_equal(*leaves) for leaves in zip(*both, strict=True))


def test_memory_is_planned(small_pair, monkeypatch):
    options = small_pair.options | {"enable_prefix_caching": True}

    def pages(**more) -> int:
        return prepare(EngineConfig(**options | more)).prefix_pages

    one = prepare(EngineConfig(**options | {"prefix_cache_tokens": PAGE}))
    assert tree_bytes(one.page_shapes()) * 8 == tree_bytes(
        (one.empty_state().cache, one.empty_state().draft_cache)
    )
    assert pages(enable_prefix_caching=False) == 0
    assert pages(prefix_cache_tokens=100) == 6
    assert pages() == 2 * 64 // PAGE
    with pytest.raises(CapacityError, match="prefix_cache_tokens = 15 is less than one page of 16"):
        pages(prefix_cache_tokens=PAGE - 1)
    taken = one.weight_bytes() + tree_bytes(one.state_shapes())
    for left, expected in ((7.9, 3), (2, 1), (1.9, 0), (-3, 0)):
        free = taken + int(left * tree_bytes(one.page_shapes()))
        monkeypatch.setattr(loading, "available_bytes", lambda *_, free=free: free)
        assert pages() == expected
    monkeypatch.setattr(memory, "available_bytes", lambda *_: taken)
    with pytest.raises(CapacityError, match=r"prefix cache .* --prefix-cache-tokens"):
        one.require_memory(weights=one.weight_bytes())
