"""An automatic budget: what widths promise, which one is chosen, and that tokens stay the same."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.pairs import Ask
from fixtures.pairs import tiny_programs as programs
from fixtures.quick import quick_jit

from k26jax.spec.auto_width import (
    NEVER,
    AutoWidth,
    choose_width,
    learn,
    promised_nodes,
    step_costs,
    wants_draft,
)
from k26jax.spec.plan import Plan
from k26jax.spec.step import run_steps
from k26jax.spec.tree import build_tree

WIDTHS = (1, 4, 16)
PLAN = Plan.auto(WIDTHS, 4, 5)
ASKS = [
    Ask((1, 2, 3), max_tokens=50),
    None,
    Ask((3, 1), max_tokens=30, temperature=0.9, top_p=0.9, seed=5),
]


def auto_of(*milliseconds: float) -> AutoWidth:
    """Costs of plain decoding and of each width, the same at every context."""
    return AutoWidth.of(jnp.zeros(1), jnp.array([milliseconds]))


@functools.cache
def compiled(plan=PLAN):
    """The program of 64 steps, whose state is donated, and the state's shapes."""
    state = replace(programs().empty_state(), auto=auto_of(1, 1, 1, 1))
    program = quick_jit(
        lambda params, state: run_steps(programs().models(params), state, plan, 64),
        donate_argnums=1,
    )
    return program.lower(programs().random_params(0), state).compile(), state


def run(milliseconds, asks=ASKS, seed=1):
    """Returns the tokens, the rows of each step and the last state."""
    params = programs().random_params(seed)
    state, first = programs().admit(params, asks)
    state = replace(state, auto=auto_of(*milliseconds))
    state, steps = jax.device_get(compiled()[0](params, state))
    tokens = {slot: [token] for slot, token in first.items()}
    for i, slot in itertools.product(range(steps.n_run), tokens):
        tokens[slot] += steps.tokens[i, slot, : steps.emitted_len[i, slot]].tolist()
    return tokens, steps.rows[: steps.n_run].tolist(), state


def plain(asks=ASKS, seed=1):
    return programs().run(programs().random_params(seed), asks, Plan.plain())[0]


@pytest.mark.parametrize(
    ("milliseconds", "rows"),
    [
        ((1, NEVER, NEVER, NEVER), {1}),
        ((NEVER, 1, NEVER, NEVER), {1}),
        ((NEVER, NEVER, 1, NEVER), {4}),
        ((NEVER, NEVER, NEVER, 1), {16}),
        ((1, 1.01, 1.02, 1.03), {1, 4, 16}),
    ],
    ids=["plain", "draft of one row", "4", "16", "what pays"],
)
def test_costs_decide_the_rows_and_never_the_tokens(milliseconds, rows):
    """Greedy and seeded sampling, side by side in one batch."""
    tokens, chosen, _ = run(milliseconds)
    assert tokens == plain()
    assert set(chosen) <= rows
    assert len(rows) > 1 or set(chosen) == rows


@pytest.mark.parametrize(
    ("milliseconds", "rows"),
    [
        ((NEVER, 1, NEVER, NEVER), {1}),
        ((NEVER, NEVER, 1, NEVER), {4}),
        ((NEVER, NEVER, NEVER, 1), {16}),
    ],
    ids=["1", "4", "16"],
)
def test_penalties_and_log_probabilities_do_not_depend_on_the_rows(milliseconds, rows):
    params, plan = programs().random_params(1), PLAN.with_extras()
    extras = {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "min_tokens": 5, "logprobs": 0}
    asks = [ask and replace(ask, extras=extras, bad_words=((3, 1), (2,))) for ask in ASKS]
    state, _ = programs().admit(params, asks)
    state = replace(state, auto=auto_of(*milliseconds))
    found = jax.device_get(compiled(plan)[0](params, state)[1])
    assert set(found.rows[: found.n_run].tolist()) == rows
    one = programs().run(params, asks, Plan.plain().with_extras())[2]
    for slot in (0, 2):
        many, alone = _emitted(found, slot), _emitted(one, slot)
        assert many[0].tolist() == alone[0].tolist()
        assert 2 not in many[0]
        for x, y in zip(many[1:], alone[1:], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)


def _emitted(steps, slot) -> list[np.ndarray]:
    """A slot's tokens, and what is told of them."""
    is_new = np.arange(steps.tokens.shape[2]) < steps.emitted_len[:, slot, None]
    return [x[:, slot][is_new] for x in (steps.tokens, *steps.log_probs)]


def test_where_drafts_do_not_pay_they_are_tried_now_and_then():
    """A random drafter promises much; what it gives is learnt, and looked at every 16 steps."""
    tokens, chosen, state = run((1, 3, 3.5, 4), seed=4)
    assert tokens == plain(seed=4)
    drafts = [step for step, rows in enumerate(chosen) if rows > 1]
    assert 1 <= len(drafts) < len(chosen) / 3
    assert drafts[0] == 0
    assert any(later - earlier >= 16 for earlier, later in itertools.pairwise(drafts))
    assert float(state.auto.gain) < 0
    assert float(state.auto.accepted) < float(state.auto.promised)


def test_state_is_donated_and_no_cache_is_copied():
    """Invariant 6, with the choice in the program: it reads the caches, and writes them behind."""
    program, state = compiled()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes >= state_bytes
    caches = {tuple(leaf.shape) for leaf in jax.tree.leaves((state.cache, state.draft_cache))}
    copied = {
        tuple(int(n) for n in match.split(",") if n)
        for match in re.findall(r"= \w+\[([\d,]*)\][^=\n]* copy\(", program.as_text())
    }
    assert not caches & copied


@pytest.mark.parametrize("seed", range(4))
def test_what_widths_promise_is_the_expected_depth(seed):
    """Against all texts of a vocabulary of four, each as probable as the drafter says."""
    rng, widths = np.random.default_rng(seed), (1, 2, 3, 6, 13)
    logits = rng.normal(size=(1, 3, 4)) * 2
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-log_probs, axis=-1).astype(np.int32)
    table = np.take_along_axis(log_probs, ids, -1).astype(np.float32), ids
    tree = _tree(*table, widths[-1] - 1)
    found = promised_nodes(*table, tree, widths)[0]
    expected = np.zeros(len(widths))
    for text in itertools.product(range(4), repeat=3):
        probability = np.exp(sum(log_probs[0, depth, token] for depth, token in enumerate(text)))
        expected += [probability * _accepted(tree, width, text) for width in widths]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # The first rows of the largest tree are the tree of their own budget.
    small = _tree(*table, 5)
    np.testing.assert_array_equal(tree.parent[:, :6], small.parent)


@functools.partial(quick_jit, static_argnums=2)
def _tree(log_probs, token_ids, budget):
    return jax.vmap(lambda p, i: build_tree(p, i, budget))(log_probs, token_ids)


def _accepted(tree, width, text) -> int:
    """Nodes below the root on the path of a text, among the first rows."""
    at, depth = 0, 0
    while depth < len(text):
        children = [
            row
            for row in range(1, width)
            if tree.valid[0, row]
            and tree.parent[0, row] == at
            and tree.token_ids[0, row] == text[depth]
        ]
        if not children:
            break
        at, depth = children[0], depth + 1
    return depth


def test_padding_and_missing_candidates_promise_nothing():
    table = np.array([[[-0.1, -np.inf], [np.nan, np.nan]]], np.float32)
    ids = np.array([[[0, 1], [0, 1]]], np.int32)
    found = promised_nodes(table, ids, _tree(table, ids, 3), (1, 2, 4))
    np.testing.assert_allclose(found, [[0, np.exp(-0.1), np.exp(-0.1)]], rtol=1e-6)


def test_of_a_sure_drafter_the_best_tree_is_the_chain():
    log_probs = np.log(np.array([[[0.97, 0.02, 0.01]] * 4], np.float32))
    ids = np.tile(np.arange(3, dtype=np.int32), (1, 4, 1))
    tree = _tree(log_probs, ids, 15)
    promised = promised_nodes(log_probs, ids, tree, (1, 5, 16))
    choice = _choice(auto_of(5, 6, 7, 9), promised, [40], widths=(1, 5, 16))
    assert int(choice.rows) == 5
    assert tree.parent[0, :5].tolist() == [-1, 0, 1, 2, 3]
    assert tree.token_ids[0, :5].tolist() == [0] * 5


def _choice(auto, promised, remaining, widths=WIDTHS, *, drafts=True):
    costs, remaining = step_costs(auto, jnp.int32(0)), jnp.asarray(remaining, jnp.int32)
    promised = jnp.asarray(promised, jnp.float32)
    return choose_width(auto, costs, jnp.bool_(drafts), promised, remaining, widths)


@pytest.mark.parametrize(
    ("milliseconds", "promised", "remaining", "rows"),
    [
        ((1, 1, 3, 9), [[0, 1.5, 2.0]], [40], 1),
        ((1, 1, 2, 9), [[0, 1.5, 2.0]], [40], 4),
        ((1, 1, 2, 2.1), [[0, 1.5, 2.0]], [40], 16),
        ((1, 1, 2, 2.1), [[0, 1.5, 3.0]], [2], 1),  # two tokens are all it may emit
        ((1, 1, 1.8, 2.1), [[0, 1.5, 3.0]], [2], 4),
        # Two slots, of which one is sure; and a third that is idle.
        ((1, 1, 1.3, 3), [[0, 0.1, 0.2], [0, 2, 7], [0, 3, 9]], [40, 40, 0], 4),
        ((1, 1, 1.3, 2.8), [[0, 0.1, 0.2], [0, 2, 7], [0, 3, 9]], [40, 40, 0], 16),
    ],
)
def test_the_choice_is_the_most_tokens_a_millisecond(milliseconds, promised, remaining, rows):
    assert int(_choice(auto_of(*milliseconds), promised, remaining).rows) == rows
    choice = _choice(auto_of(*milliseconds), promised, remaining, drafts=False)
    assert (int(choice.index), int(choice.rows)) == (0, 1)


def test_costs_between_and_beyond_the_contexts():
    auto = AutoWidth.of(jnp.array([100.0, 300.0, 700.0]), jnp.array([[1.0, 2], [3, 4], [3, 8]]))
    for length, expected in (
        (0, [1, 2]),
        (200, [2, 3]),
        (300, [3, 4]),
        (600, [3, 7]),
        (999, [3, 8]),
    ):
        np.testing.assert_allclose(step_costs(auto, jnp.int32(length)), expected, rtol=1e-6)


def test_what_came_of_promises_puts_the_next_ones_right():
    """Of a drafter that promises 2.5 times what comes half is believed; soon it is not asked."""
    auto = auto_of(1, 1.2, 1.5, 3)
    promised, costs = [[0, 2.5, 6.0]], step_costs(auto_of(1, 1.2, 1.5, 3), jnp.int32(0))
    assert int(_choice(auto, promised, [40]).rows) == 4
    step = quick_jit(lambda auto, nodes: learn(auto, _choice(auto, promised, [40]), nodes))
    for _ in range(200):
        auto = step(auto, jnp.array([2], jnp.int32))
    right = (float(auto.accepted) + 8) / (float(auto.promised) + 8)
    assert 0.4 < right < 0.5
    assert bool(wants_draft(auto, costs))  # two tokens in the time of 1.5
    for _ in range(60):
        auto = step(auto, jnp.array([1], jnp.int32))
    assert not bool(wants_draft(auto, costs))
    waited = replace(auto, waited=jnp.int32(15))
    assert bool(wants_draft(waited, costs))
    for _ in range(4):  # a drafter that is right again is soon asked again
        auto = step(auto, jnp.array([8], jnp.int32))
    assert bool(wants_draft(auto, costs))
