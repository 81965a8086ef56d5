"""Draft trees against a float64 heap in plain Python, and by their laws."""

import functools
from itertools import pairwise

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from spec.oracle import heap_tree, table_of, visibility
from spec.tree_checks import (
    BUDGETS,
    DEPTHS,
    build,
    builder,
    check_equal,
    check_structure,
    mask_of,
    padded,
)

from k26jax.errors import ConfigError
from k26jax.pallas.tree_build.cost import add
from k26jax.spec import tree as tree_module
from k26jax.spec.tree import build_tree, chain_tree, draft_table, root_tree


@st.composite
def exact_tables(draw, budgets=BUDGETS):
    """(log_probs, token_ids, budget) whose float64 sums are exact, so that every order is defined.

    Log-probs are integers times a power of two for the table and one for the row: ties, chains of
    probability 1, sums of more bits than float32 has, subnormal and enormous values.
    """
    budget = draw(st.sampled_from(budgets))
    depths, width = draw(st.integers(0, DEPTHS)), draw(st.integers(1, max(budget, 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread, apart = draw(
        st.sampled_from([(0, 0), (1, 28), (2, 0), (2, 28), (40, 28), (60_000, 20)])
    )
    gaps = rng.integers(0, spread + 1, (depths, width))
    gaps[:, 0] *= rng.random(depths) < draw(st.sampled_from([0, 0.5, 1]))
    scales = rng.choice([0, apart // 3, apart], (depths, 1))
    scales = scales + draw(st.sampled_from([-149, -130, -40, -10, 0, 80]))
    log_probs = np.ldexp(-np.cumsum(gaps, axis=1).astype(np.float64), scales).astype(np.float32)
    if draw(st.booleans()):
        end = rng.integers(0, width + 1, (depths, 1))
        end = np.where(rng.random((depths, 1)) < 0.7, width, end)
        log_probs[np.arange(width) >= end] = draw(st.sampled_from([-np.inf, np.nan]))
    token_ids = np.argsort(rng.random((depths, max(width, 300))), axis=1)[:, :width]
    return log_probs, token_ids.astype(np.int32), budget


@settings(max_examples=100)
@given(exact_tables())
def test_build_tree_equals_heap(table):
    """Bug 63: ties, -inf, one token taking all, K below the budget; T50: token 0 is a token."""
    tree = build(*table)
    check_structure(tree)
    check_equal(tree, heap_tree(*table), table[2])


def test_the_tests_own_builder_takes_tables_deeper_than_usual():
    table = -np.arange(2, dtype=np.float32) + np.zeros((DEPTHS + 4, 1), np.float32)
    token_ids = np.tile(np.arange(2, dtype=np.int32), (DEPTHS + 4, 1))
    check_equal(build(table, token_ids, 16), heap_tree(table, token_ids, 16), 16)


@pytest.mark.parametrize(
    ("depths", "width", "budget"),
    [(1, 5, 16), (4, 1, 7), (3, 40, 4), (20, 3, 5), (255, 2, 33)],
)
def test_build_tree_of_any_shape(depths, width, budget):
    """Bug 63: budget above the number of prefixes, any top-k, more rows than nodes."""
    rng = np.random.default_rng(depths)
    for spread in (1, 3, 1000):
        log_probs = -np.cumsum(rng.integers(0, spread, (depths, width)), axis=1) / 1024
        log_probs = log_probs.astype(np.float32)
        token_ids = np.tile(np.arange(width, dtype=np.int32), (depths, 1))
        tree = jax.device_get(builder(budget)(log_probs, token_ids))
        check_structure(tree)
        check_equal(tree, heap_tree(log_probs, token_ids, budget), budget)
        assert len(tree.parent) == budget + 1


@given(st.lists(exact_tables([16]), min_size=4, max_size=4))
def test_batched_trees_equal_single_trees(tables):
    """Bug 50: a sequence's tree does not depend on its neighbours or on its place."""
    stack = [np.stack(x) for x in zip(*(padded(*table) for table in tables), strict=True)]
    forward = builder(16, batched=True)(*stack)
    backward = builder(16, batched=True)(*(x[::-1].copy() for x in stack))
    for place, table in enumerate(tables):
        single = build(*table)
        for batch, index in ((forward, place), (backward, 3 - place)):
            for one, many in zip(jax.tree.leaves(single), jax.tree.leaves(batch), strict=True):
                np.testing.assert_array_equal(one, many[index])


@given(exact_tables([64]))
def test_smaller_tree_is_prefix_of_larger(table):
    log_probs, token_ids, _ = table
    trees = [build(log_probs, token_ids, budget) for budget in BUDGETS if budget <= 64]
    for small, large in pairwise(trees):
        rows = len(small.parent)
        for name in ("token_ids", "parent", "depth", "valid"):
            np.testing.assert_array_equal(getattr(small, name), getattr(large, name)[:rows])
        mask = np.asarray(mask_of(large))[:rows, :rows]
        np.testing.assert_array_equal(np.asarray(mask_of(small)), mask)


def test_budget_for_all_prefixes_gives_all():
    log_probs, token_ids = np.log(np.full((3, 3), 1 / 3)), np.arange(9).reshape(3, 3)
    tree = build(log_probs, token_ids, 3 + 9 + 27)
    assert np.bincount(tree.depth[tree.valid]).tolist() == [1, 3, 9, 27]


def test_certain_tokens_make_a_chain():
    """Bug 47: the mask of a linear tree is the causal mask, element for element."""
    token_ids = np.arange(7 * 16, dtype=np.int32).reshape(7, 16)
    log_probs = np.where(np.arange(16) == 0, 0, -30 - np.arange(16.0)).repeat(7).reshape(16, 7).T
    tree, chain = build(log_probs, token_ids, 7), jax.jit(chain_tree)(token_ids[:, 0])
    for built, linear in zip(jax.tree.leaves(tree), jax.tree.leaves(chain), strict=True):
        np.testing.assert_array_equal(built, linear)
    np.testing.assert_array_equal(np.asarray(mask_of(chain)), np.tri(8, dtype=bool))


@pytest.mark.parametrize("length", [0, 1, 31, 32, 255])
def test_chain_tree(length):
    chain = jax.device_get(jax.jit(chain_tree)(np.arange(5, 5 + length)))
    check_structure(chain)
    assert chain.valid.all()
    assert chain.token_ids.tolist() == [0, *range(5, 5 + length)]
    assert chain.depth.tolist() == list(range(length + 1))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_no_budget_or_no_candidates_gives_the_root(shape):
    log_probs, token_ids = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    for budget in (-1, 0) if 0 not in shape else (-1, 0, 40):
        tree = jax.device_get(builder(budget)(log_probs, token_ids))
        check_structure(tree)
        assert tree.valid.tolist() == [True] + [False] * max(budget, 0)
        if budget == 0:
            for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(root_tree()), strict=True):
                np.testing.assert_array_equal(one, other)


def test_with_root_sets_row_0_alone():
    chain = jax.jit(chain_tree)(np.array([1, 2]))
    trees = jax.tree.map(lambda x: np.stack([x, x]), chain)
    rooted = trees.with_root(jnp.array([7, 9]))
    assert rooted.token_ids.tolist() == [[7, 1, 2], [9, 1, 2]]
    assert trees.token_ids[:, 0].tolist() == [0, 0]
    assert root_tree().with_root(5).token_ids.tolist() == [5]


def test_ancestor_mask_of_a_batch():
    log_probs = np.zeros((4, DEPTHS, 16), np.float32)
    log_probs[1:] = -np.cumsum(np.ones((3, DEPTHS, 16)), axis=2)
    token_ids = np.tile(np.arange(16, dtype=np.int32), (4, DEPTHS, 1))
    trees = jax.device_get(builder(16, batched=True)(log_probs, token_ids))
    assert trees.parent[0].tolist() != trees.parent[1].tolist()
    for mask, parent in zip(mask_of(trees), trees.parent, strict=True):
        np.testing.assert_array_equal(mask, visibility(parent.tolist()))


@pytest.mark.parametrize(
    ("shape", "budget", "number"),
    [((7, 300), 255, "255"), ((256, 4), 16, "256"), ((2, 7, 4), 16, "(2, 7, 4)")],
)
def test_too_large_is_refused_by_number(shape, budget, number):
    with pytest.raises(ConfigError) as error:
        build_tree(jnp.zeros(shape), jnp.zeros(shape, jnp.int32), budget)
    assert number in str(error.value)


def test_too_long_chain_is_refused_by_number():
    with pytest.raises(ConfigError, match="256"):
        chain_tree(jnp.zeros(256, jnp.int32))


@given(st.integers(0, 2**32 - 1))
def test_inexact_sums_still_give_a_tree(seed):
    """Arbitrary float32 values, whose float64 sums round: no order is promised, the laws are."""
    rng = np.random.default_rng(seed)
    log_probs = -(2.0 ** rng.uniform(-140, 127, (7, 16))).astype(np.float32)
    log_probs = np.sort(log_probs, axis=1)[:, ::-1]
    token_ids = np.argsort(rng.random((7, 16)), axis=1)
    check_structure(build(log_probs, token_ids, 16))


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_row_ends_at_its_first_entry_that_is_not_finite(value):
    log_probs = np.array([[-1, -2, value, -3, -4], [-1, value, -1, -1, -1]], np.float32)
    token_ids = np.tile(np.arange(5), (2, 1))
    tree = build(log_probs, token_ids, 16)
    check_structure(tree)
    check_equal(tree, heap_tree(log_probs, token_ids, 16), 16)


# ---- sums of log-probs


@functools.lru_cache
def running_sums(shape):
    """A program: words of the running sums along axis 0 of a table of log-probs."""

    def step(total, row):
        total = add(total, row)
        return total, total

    def sums(log_probs):
        rows = tree_module._costs(log_probs)
        zero = jax.tree.map(lambda x: jnp.zeros_like(x[0]), rows)
        return jax.lax.scan(step, zero, rows)[1]

    return jax.jit(sums).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()


ADVERSARIAL = np.array(
    [0, 2.0**-149, 2.0**-127, 2.0**-126, 1, 2.0**24, 2.0**29, 2.0**52, 2.0**53, 2.0**54, 2.0**127]
)


@given(st.integers(0, 2**32 - 1))
@example(0)
def test_costs_are_float64_sums_bit_for_bit(seed):
    """Ties to even, carries, subnormals, far exponents: what XLA may do to floats cannot matter."""
    rng = np.random.default_rng(seed)
    shape = 12, 250
    bits = rng.integers(0, 0x7F800000, shape, dtype=np.uint32).view(np.float32)
    near = np.ldexp(rng.integers(0, 2**24, shape), rng.integers(-40, 8, shape)).astype(np.float32)
    edge = np.nextafter(
        rng.choice(ADVERSARIAL, shape).astype(np.float32),
        rng.choice([0, 1e30], shape).astype(np.float32),
    )
    plain = rng.choice(ADVERSARIAL, shape).astype(np.float32)
    values = np.choose(rng.integers(0, 4, (1, shape[1])), [bits, near, edge, plain])
    words = running_sums(shape)(-values)
    found = np.asarray(words.high).astype(np.uint64) << 32 | np.asarray(words.low)
    expected = np.cumsum(values.astype(np.float64), axis=0)
    np.testing.assert_array_equal(found, expected.view(np.uint64))


# ---- table of drafted tokens


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("budget", [0, 1, 8, 40])
def test_draft_table_equals_numpy(dtype, budget):
    """Bug 63: no more columns than tokens; equal logits, the rule in bfloat16, by lowest id."""
    logits = jax.random.normal(jax.random.key(0), (2, 5, 24), dtype) * 2
    logits = logits.at[0, 0].set(1).at[1, 2, 3:].set(-jnp.inf)
    log_probs, token_ids = jax.jit(draft_table, static_argnums=1)(logits, budget)
    expected = table_of(np.asarray(logits, np.float32), budget)
    assert log_probs.shape == (2, 5, min(budget, 24))
    assert (log_probs.dtype, token_ids.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(token_ids, expected[1])
    np.testing.assert_allclose(log_probs, expected[0], rtol=1e-6, atol=1e-6)


def test_draft_table_rows_without_a_finite_logit_end_the_tree():
    logits = jnp.array([[1.0, 0.0, 2.0], [-jnp.inf] * 3, [0.0, 0.0, 0.0]])
    tree = build(*draft_table(logits, 16), 16)
    assert tree.token_ids[tree.valid].tolist() == [0, 2, 0, 1]
    assert tree.depth[tree.valid].tolist() == [0, 1, 1, 1]
