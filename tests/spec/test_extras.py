"""Penalties, biases, masks and log-probabilities: exact under speculation, and what they say."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.pairs import CHUNK, Ask, tiny_programs
from fixtures.quick import quick_jit
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from k26jax.engine.rows import adjustments_row
from k26jax.sharding.mesh import on_mesh
from k26jax.spec.adjust import adjust, lineage
from k26jax.spec.log_probs import log_probs_of
from k26jax.spec.plan import Plan
from k26jax.spec.prefill import Chunk, prefill
from k26jax.spec.tree import build_tree

PLAIN = Plan.plain()
DRAFTING = [Plan.chain(4, 5), Plan.tree(6, 4, 5)]
VOCAB = tiny_programs().model.vocab_size
tokens = st.integers(0, VOCAB - 1)


def extras(**more):
    """Sampling parameters that change logits, often several at once."""
    bias = st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.3, 2.0]), max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "presence_penalty": st.sampled_from([-1.0, 0.4, 2.0]),
            "frequency_penalty": st.sampled_from([-0.3, 0.1, 1.7]),
            "repetition_penalty": st.sampled_from([0.7, 1.3]),
            "logit_bias": bias,
            "min_tokens": st.integers(1, 12),
            **more,
        },
    )


@st.composite
def asks(draw, *, hot: bool):
    """Three prompts; about one of four asks for nothing beside the others that do."""
    found = []
    for _ in range(3):
        found.append(
            Ask(
                prompt=tuple(draw(st.lists(tokens, min_size=1, max_size=9))),
                max_tokens=draw(st.integers(12, 20)),
                temperature=draw(st.sampled_from([0.0, 0.7, 1.3])) if hot else 0.0,
                top_p=draw(st.sampled_from([1.0, 0.8])) if hot else 1.0,
                seed=draw(st.integers(0, 2**64 - 1)),
                stop_ids=tuple(draw(st.lists(tokens, max_size=2))),
                extras=draw(st.one_of(extras(), extras(), extras(), st.just({}))),
                bad_words=tuple(
                    map(tuple, draw(st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=3)))
                ),
            )
        )
    return found


@functools.cache
def _all_logits():
    programs = tiny_programs()
    return quick_jit(
        lambda params, chunk, state: (
            prefill(programs.models(params), chunk, state, all_logits=True)[1].logits
        )
    )


def logits_along(params, ids) -> np.ndarray:
    """The target's logits after each of at most CHUNK tokens, by one plain pass."""
    padded = np.zeros(CHUNK, np.int32)
    padded[: len(ids)] = ids
    chunk = Chunk(
        token_ids=padded,
        count=np.int32(len(ids)),
        start=np.int32(0),
        slot=np.int32(0),
        is_last=np.bool_(True),
        max_tokens=np.int32(1),
        sampling=Ask(tuple(ids)).sampling(),
    )
    state = tiny_programs().empty_state()
    return np.asarray(_all_logits()(params, chunk, state))[: len(ids)].astype(np.float64)


def expected(logits, ask: Ask, emitted) -> np.ndarray:
    """What a token after `emitted` is chosen from, written out for one row in float64."""
    params, new = ask.request.params, logits.copy()
    for token in range(len(new)):
        new[token] += params.biases.get(token, 0.0)
        if token in ask.prompt or token in emitted:
            factor = params.repetition_penalty
            new[token] = new[token] / factor if new[token] > 0 else new[token] * factor
        new[token] -= params.frequency_penalty * emitted.count(token)
        new[token] -= params.presence_penalty * (token in emitted)
    if len(emitted) < params.min_tokens:
        new[list(ask.stop_ids)] = -np.inf
    for word in ask.bad_words:
        before = list(word[:-1])
        if not before or emitted[-len(before) :] == before:
            new[word[-1]] = -np.inf
    return new


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), asked=asks(hot=True))
def test_what_is_adjusted_is_the_same_for_every_tree(seed, asked):
    """T53: a node's counts include its path; greedy and seeded, beside slots that ask nothing."""
    programs = tiny_programs()
    params = programs.random_params(seed)
    plain, _, steps = programs.run(params, asked, PLAIN.with_extras())
    for plan in DRAFTING:
        found, _, fewer = programs.run(params, asked, plan.with_extras())
        assert found == plain, plan
        assert fewer.n_run <= steps.n_run
    quiet = [Ask(ask.prompt, ask.max_tokens) for ask in asked]
    blind, _, _ = programs.run(params, quiet, DRAFTING[1])
    mixed = [ask if slot == 0 else quiet[slot] for slot, ask in enumerate(asked)]
    found, _, _ = programs.run(params, mixed, DRAFTING[1].with_extras())
    assert [found[slot] for slot in (1, 2)] == [blind[slot] for slot in (1, 2)]


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), asked=asks(hot=False))
def test_greedy_tokens_are_the_best_of_the_adjusted_logits(seed, asked):
    """Each token is the argmax of a row that NumPy adjusts by the definitions, from the first."""
    programs = tiny_programs()
    params = programs.random_params(seed)
    found, _, _ = programs.run(params, asked, DRAFTING[1].with_extras())
    for slot, ask in enumerate(asked):
        emitted = found[slot]
        rows = logits_along(params, [*ask.prompt, *emitted][:-1])[len(ask.prompt) - 1 :]
        for place, token in enumerate(emitted):
            row = expected(rows[place], ask, emitted[:place])
            if np.isinf(row).all():
                break
            assert row[token] >= row.max() - 1e-4, (place, token)
            is_end = token in ask.stop_ids
            assert not is_end or place >= ask.request.params.min_tokens
            assert not is_end or place == len(emitted) - 1


def test_adjustments_change_tokens_and_trees_are_still_right():
    """Guards the tests above: without it, extras that do nothing would pass half of them."""
    programs = tiny_programs()
    params = programs.random_params(0)
    plain = Ask((1, 2), max_tokens=20)
    asked = [
        Ask((1, 2), max_tokens=20, extras={"frequency_penalty": 2.0}),
        Ask((1, 2), max_tokens=20, extras={"repetition_penalty": 1.5}),
        plain,
    ]
    found, _, steps = programs.run(params, asked, DRAFTING[1].with_extras())
    assert found[0] != found[2] != found[1]
    assert found[0] != found[1]
    assert (steps.emitted_len > 1).any(axis=0)[:2].all()
    # Without its own path a node would repeat what it just emitted.
    counts = np.bincount(found[0], minlength=VOCAB)
    assert counts.max() < np.bincount(found[2], minlength=VOCAB).max()


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), asked=asks(hot=True))
def test_66_log_probabilities_are_the_target_s_own(seed, asked):
    """Under every plan those of log_softmax of the raw logits, to 1e-4 in float32."""
    programs = tiny_programs()
    params = programs.random_params(seed)
    asked = [
        Ask(**(vars(ask) | {"extras": ask.extras | {"logprobs": 0}} if slot != 1 else vars(ask)))
        for slot, ask in enumerate(asked)
    ]
    for plan in (PLAIN, *DRAFTING):
        found, _, steps = programs.run(params, asked, plan.with_extras())
        for slot in (0, 2):
            told = _told(programs.first_log_probs[slot], steps, slot)
            ask, emitted = asked[slot], found[slot]
            rows = logits_along(params, [*ask.prompt, *emitted][:-1])[len(ask.prompt) - 1 :]
            rows = np.asarray(jax.nn.log_softmax(jnp.asarray(rows, jnp.float32)))
            assert len(told) == len(emitted)
            for row, token, (chosen, place, ids, top) in zip(rows, emitted, told, strict=True):
                assert chosen == pytest.approx(row[token], abs=1e-4)
                assert sorted(ids) == list(range(VOCAB))
                assert list(top) == sorted(top, reverse=True)
                np.testing.assert_allclose(top, row[ids], atol=1e-4)
                assert top[place - 1] == pytest.approx(chosen, abs=1e-6)
                assert np.exp(top).sum() == pytest.approx(1, abs=1e-5)


def _told(first, steps, slot):
    """(log-probability, rank, best ids, best log-probabilities) of each token of a slot."""
    found = [[np.asarray(x)[0, 0] for x in first]]
    for step in range(steps.n_run):
        for place in range(steps.emitted_len[step, slot]):
            found.append([np.asarray(x)[step, slot, place] for x in steps.log_probs])
    return found


def test_a_program_without_extras_tells_nothing():
    programs = tiny_programs()
    _, _, steps = programs.run(programs.random_params(0), [Ask((1,))] + [None] * 2, DRAFTING[1])
    assert steps.log_probs is None


def _rows(width: int):
    """Random logits, a tree for each of three slots, and what the slots change."""
    rng = np.random.default_rng(7)
    table = -np.sort(rng.random((3, 3, 4)).astype(np.float32))
    ids = np.stack([[rng.permutation(width)[:4] for _ in range(3)] for _ in range(3)])
    build = jax.vmap(lambda x, i: build_tree(x, i, 8).with_root(2))
    tree = jax.device_get(quick_jit(build)(table, ids.astype(np.int32)))
    logits = rng.normal(size=(3, 9, width)).astype(np.float32) * 3
    asked = [
        Ask(
            (1, 2, 40),
            stop_ids=(3, 60),
            extras={
                "presence_penalty": 0.5,
                "frequency_penalty": 0.7,
                "repetition_penalty": 1.3,
                "logit_bias": {5: 2.0, 63: -100.0},
                "min_tokens": 3,
            },
            bad_words=((2, int(tree.token_ids[0, 1]), 9), (61,), (50, 9)),
        ),
        Ask((1,)),
        Ask((7,), bad_words=((33, 2, 17),)),
    ]
    rows = [adjustments_row(ask.request, width) for ask in asked]
    adjustments = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    emitted = np.array([[2, 2], [2, 2], [33, 2]], np.int32)
    begun = quick_jit(lambda x: x.emitted(jnp.arange(3), emitted, jnp.full(3, 2)).without(1))
    adjustments = begun(adjustments)
    stop_ids = np.concatenate([ask.sampling().stop_ids for ask in asked])
    position = np.array([[3], [1], [1]], np.int32) + 2 + tree.depth
    path = quick_jit(functools.partial(lineage, depth=3))(tree)
    return asked, tree, logits, (adjustments, stop_ids, path, tree.depth, position)


def test_every_node_counts_its_path_and_ranks_that_share_the_vocabulary_agree():
    width = 64
    asked, tree, logits, settings_ = _rows(width)
    alone = np.asarray(quick_jit(adjust)(logits, *settings_))
    path = np.asarray(settings_[2])
    for slot, ask in enumerate(asked):
        for node in range(9):
            before = [[2, 2], [2, 2], [33, 2]][slot]
            emitted = before + [int(x) for x in path[slot, node] if x >= 0][::-1]
            assert len(emitted) == 2 + tree.depth[slot, node]
            row = logits[slot, node].astype(np.float64)
            want = row if slot == 1 else expected(row, ask, emitted)
            np.testing.assert_allclose(alone[slot, node], want, atol=1e-5)
    assert np.array_equal(alone[1], logits[1])
    assert np.isinf(alone[0, 1, 9])  # the root and the first node write the bad word
    assert np.isinf(alone[2, 0, 17])
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("expert", "model"))
    cut, whole = PartitionSpec(None, None, "model"), PartitionSpec()
    shared = quick_jit(on_mesh(adjust, mesh, (cut, *[whole] * 5), cut))(logits, *settings_)
    np.testing.assert_array_equal(np.asarray(shared), alone)


def test_ranks_that_share_the_vocabulary_tell_the_same_log_probabilities():
    width = 64
    logits = np.random.default_rng(3).normal(size=(2, 5, width)).astype(np.float32) * 4
    logits[0, 0, [3, 20]] = 30.0  # equal logits on two ranks: the lower id is first
    path = np.array([[0, 3, 4], [0, 1, 0]], np.int32)
    chosen = np.array([[20, 63, 1], [0, 31, 5]], np.int32)
    arguments = logits, path, chosen, np.array([True, False])
    alone = quick_jit(log_probs_of)(*arguments)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("expert", "model"))
    cut, whole = PartitionSpec(None, None, "model"), PartitionSpec()
    program = on_mesh(log_probs_of, mesh, (cut, whole, whole, whole), whole)
    shared = quick_jit(program)(*arguments)
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_array_equal(alone.top_ids, shared.top_ids)
    rows = np.take_along_axis(logits, path[..., None], axis=1)
    want = np.asarray(jax.nn.log_softmax(rows))
    np.testing.assert_allclose(
        alone.chosen, np.take_along_axis(want, chosen[..., None], axis=-1)[..., 0], atol=1e-5
    )
    assert alone.top_ids[0, 0, :2].tolist() == [3, 20]
    assert alone.top_ids.shape == (2, 3, 20)
    assert alone.rank[0, 0] == 1  # none is larger
    silent = quick_jit(log_probs_of)(logits, path, chosen, np.array([False, False]))
    assert not any(np.asarray(x).any() for x in silent)
