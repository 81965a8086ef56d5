"""Invariants 1 to 4: speculation changes the number of steps and nothing else."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from fixtures.pairs import CAPACITY, Ask, plans, tiny_programs
from fixtures.quick import quick_jit
from hypothesis import given, settings
from hypothesis import strategies as st

from k26jax.spec.plan import Plan

PLANS = [
    *plans(depth=4, block_size=5, budgets=(1, 6, 24, 64)),
    *plans(depth=2, block_size=3, budgets=(3,))[1:],
    *plans(depth=7, block_size=8, budgets=(16,))[1:],
]
VOCAB = tiny_programs().model.vocab_size
tokens = st.integers(0, VOCAB - 1)


@st.composite
def asks(draw, *, hot: bool):
    """Up to three prompts of unequal lengths, each with its own settings."""
    found = []
    for _ in range(3):
        if draw(st.integers(0, 4)) == 0:
            found.append(None)
            continue
        found.append(
            Ask(
                prompt=tuple(draw(st.lists(tokens, min_size=1, max_size=40))),
                max_tokens=draw(st.integers(1, 40)),
                temperature=draw(st.sampled_from([0.0, 0.6, 1.0, 1.5])) if hot else 0.0,
                top_k=draw(st.sampled_from([0, 0, 3])) if hot else 0,
                top_p=draw(st.sampled_from([1.0, 1.0, 0.8])) if hot else 1.0,
                min_p=draw(st.sampled_from([0.0, 0.0, 0.1])) if hot else 0.0,
                seed=draw(st.integers(0, 2**64 - 1)),
                stop_ids=tuple(draw(st.lists(tokens, max_size=2))),
            )
        )
    return found


@settings(max_examples=12)
@given(seed=st.integers(0, 1000), asked=asks(hot=False))
def test_greedy_tokens_are_those_of_plain_decoding(seed, asked):
    """Invariant 1, for every plan and a batch of unequal prompts, limits and stop ids."""
    _all_plans_agree(seed, asked)


@settings(max_examples=12)
@given(seed=st.integers(0, 1000), asked=asks(hot=True))
def test_sampled_tokens_are_those_of_plain_decoding(seed, asked):
    """Invariant 2, first half: one seed, the same tokens, whatever the tree."""
    _all_plans_agree(seed, asked)


def _all_plans_agree(seed, asked):
    programs = tiny_programs()
    params = programs.random_params(seed)
    plain, _, steps = programs.run(params, asked, PLANS[0])
    for plan in PLANS[1:]:
        found, state, fewer = programs.run(params, asked, plan)
        assert found == plain, plan
        assert fewer.n_run <= steps.n_run
        assert not np.asarray(state.is_active).any()
    for slot, ask in enumerate(asked):
        if ask is not None:
            alone, _, _ = programs.run(
                params, [ask if i == (slot + 1) % 3 else None for i in range(3)], PLANS[0]
            )
            assert alone[(slot + 1) % 3] == plain[slot]


def test_trees_of_small_vocabularies_are_often_right():
    """The tests above mean little unless several nodes are accepted now and then."""
    programs = tiny_programs()
    longest = 0
    for seed in range(3):
        params = programs.random_params(seed)
        ask = Ask((1, 2, 3), max_tokens=40)
        _, _, steps = programs.run(params, [ask, None, None], PLANS[4])
        longest = max(longest, steps.accepted_len.max())
    assert longest >= 3


@settings(max_examples=10)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(tokens, min_size=1, max_size=30),
    plan=st.sampled_from(PLANS[1:]),
)
def test_node_logits_equal_a_plain_forward_on_the_root_path(seed, prompt, plan):
    """Invariant 3, bug log 46: positions are depths and a node sees its ancestors alone."""
    programs = tiny_programs()
    params = programs.random_params(seed)
    state, first = programs.admit(params, [None, Ask(tuple(prompt)), None])
    tree, logits = _verified(programs, params, state, plan)
    paths = []
    for node in range(plan.width):
        path, at = [], node
        while at > 0:
            path.append(int(tree.token_ids[1, at]))
            at = int(tree.parent[1, at])
        paths.append([*prompt, first[1], *reversed(path)])
    expected = _plain_logits(programs, params, paths)
    for node in np.flatnonzero(tree.valid[1]):
        np.testing.assert_allclose(logits[1, node], expected[node], atol=1e-4)


def _verified(programs, params, state, plan):
    from k26jax.spec.draft import draft
    from k26jax.spec.tree_build import tree_build
    from k26jax.spec.verify import verify

    def run(params, state):
        models = programs.models(params)
        tree = tree_build(draft(models, state, plan), state.anchor, plan)
        return tree, verify(models, tree, state, plan).logits

    key = ("verified", plan)
    cache = programs.__dict__.setdefault("extra", {})
    program = cache.setdefault(key, quick_jit(run))
    return jax.device_get(program(params, state))


def _plain_logits(programs, params, sequences):
    """Logits after the last token of each sequence, by the expanded form without a cache."""

    def run(params, ids, lengths):
        target = programs.models(params).target
        n = ids.shape[1]
        visible = jnp.tril(jnp.ones((n, n), bool))[None]
        hidden, _ = target.forward_expanded(ids, jnp.arange(n)[None], visible)
        return target.logits(hidden[jnp.arange(len(ids)), lengths - 1])

    rows, width = 65, 48
    ids = np.zeros((rows, width), np.int32)
    for row, sequence in zip(ids, sequences, strict=False):
        row[: len(sequence)] = sequence
    lengths = np.array([len(s) for s in sequences] + [1] * (rows - len(sequences)))
    cache = programs.__dict__.setdefault("extra", {})
    program = cache.setdefault("plain_logits", quick_jit(run))
    return np.asarray(program(params, ids, lengths))


@settings(max_examples=10)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(tokens, min_size=1, max_size=30),
    plan=st.sampled_from(PLANS[1:]),
    limit=st.integers(1, 6),
)
def test_committed_rows_are_those_of_plain_decoding(seed, prompt, plan, limit):
    """Invariant 4, T33: caches hold exactly rows 0 to length - 1 of the same tokens."""
    programs = tiny_programs()
    params = programs.random_params(seed)
    ask = Ask(tuple(prompt), max_tokens=CAPACITY - len(prompt))
    _, state, _ = programs.run(params, [None, ask, None], plan, fill=np.nan, limit=limit)
    length = int(state.length[1])
    emitted = length - len(prompt)
    _, plain, _ = programs.run(params, [None, ask, None], PLANS[0], limit=emitted)
    assert int(plain.length[1]) == length
    assert int(plain.anchor[1]) == int(state.anchor[1])
    for name in ("c_kv", "k_pe"):
        mine, theirs = (np.asarray(getattr(s.cache, name)) for s in (state, plain))
        np.testing.assert_allclose(mine[:, 1, :length], theirs[:, 1, :length], atol=2e-5)
        assert np.isnan(mine[:, 1, length:]).all(), "a row out of use was written"
        assert np.isnan(mine[:, [0, 2]]).all(), "another slot was written"
    mine = np.asarray(state.draft_cache.keys)
    assert np.isfinite(mine[:, 1, :length]).all()
    assert np.isnan(mine[:, 1, length:]).all()


@settings(max_examples=6)
@given(seed=st.integers(0, 1000), prompt=st.lists(tokens, min_size=1, max_size=30))
def test_rows_out_of_use_may_hold_nan(seed, prompt):
    """Invariant 4, T26, T45: poison in unused rows and slots changes no token."""
    programs = tiny_programs()
    params = programs.random_params(seed)
    asked = [None, Ask(tuple(prompt), max_tokens=30), None]
    for plan in (PLANS[0], PLANS[1], PLANS[3]):
        clean, _, _ = programs.run(params, asked, plan)
        poisoned, _, _ = programs.run(params, asked, plan, fill=np.nan)
        assert poisoned == clean


@settings(max_examples=6)
@given(seed=st.integers(0, 1000), prompt=st.lists(tokens, min_size=1, max_size=30))
def test_a_tree_with_the_chain_in_it_never_accepts_less(seed, prompt):
    """From one state, step by step; and the whole tree of a depth holds the chain."""
    programs = tiny_programs()
    params = programs.random_params(seed)
    state, _ = programs.admit(params, [Ask(tuple(prompt), max_tokens=50), None, None])
    chain_step = programs.one_step(Plan.chain(2, 3))
    # All 7 + 49 paths of depth 2 fit in 64 nodes, the spine among them.
    tree_step = programs.one_step(Plan.tree(64, 2, 3))
    for _ in range(5):
        _, _, chain = chain_step(params, state)
        state, tree, wide = tree_step(params, state)
        assert int(tree.valid[0].sum()) == 1 + VOCAB + VOCAB**2
        assert int(wide.accepted_len[0]) >= int(chain.accepted_len[0])


def test_a_spine_only_tree_is_the_chain():
    """A budget-1 tree and a chain of depth 1 try the same token and accept the same."""
    programs = tiny_programs()
    for seed in range(4):
        params = programs.random_params(seed)
        asked = [Ask((1, 2, 3), max_tokens=30), None, Ask((4, 5), max_tokens=20)]
        state, _ = programs.admit(params, asked)
        for _ in range(4):
            _, chain, chained = programs.one_step(Plan.chain(1, 5))(params, state)
            new, tree, accepted = programs.one_step(Plan.tree(1, 1, 5))(params, state)
            for field in dataclasses.fields(tree):
                np.testing.assert_array_equal(
                    getattr(tree, field.name), getattr(chain, field.name), err_msg=field.name
                )
            np.testing.assert_array_equal(accepted.path, chained.path)
            state = new
