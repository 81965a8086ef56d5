"""The router's kernels against plain JAX, and the work list against a sorted list."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quick import quick_jit
from hypothesis import given, settings

from k26jax.pallas.router import Blocks, block_list, kernel, reference, route, route_and_list
from k26jax.pallas.router.cases import CASES, KIMI_K26

SMALL = [case for case in CASES if case.is_small]


def inputs(case, seed: int = 0):
    rng = np.random.default_rng(seed)
    logits = (2 * rng.standard_normal((case.n_tokens, case.n_experts))).astype(np.float32)
    bias = (0.3 * rng.standard_normal(case.n_experts)).astype(np.float32)
    return logits, bias if case.has_bias else None, rng.random(case.n_tokens) < 0.8


def oracle(topk_ids, n_experts: int, rows: int) -> Blocks:
    flat = [int(e) if 0 <= e < n_experts else n_experts for e in np.ravel(topk_ids)]
    pairs = len(flat)
    order = sorted(range(pairs), key=lambda pair: (flat[pair], pair))
    blocks, place = [], 0
    for expert in range(n_experts):
        left = flat.count(expert)
        while left:
            blocks.append((expert, place, min(left, rows)))
            place += blocks[-1][2]
            left -= blocks[-1][2]
    n_blocks = len(blocks)
    blocks += [(0, 0, 0)] * (min(pairs, n_experts) + pairs // rows - n_blocks)
    fields = (np.array(field, np.int32) for field in zip(*blocks, strict=True))
    padded = np.array(order + [pairs] * rows, np.int32)
    return Blocks(padded, *fields, np.array([n_blocks], np.int32))


def assert_same(found, expected):
    assert found.__class__ is expected.__class__
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


@functools.cache
def program(function, **options):
    """A program of one of the operations, by the kernels."""
    return quick_jit(functools.partial(function, kernels="pallas", **options))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_equals_reference(case):
    logits, bias, valid = inputs(case)

    def both(logits, bias, valid):
        expected = reference.route_and_list(logits, bias, valid, rows=case.rows, **case.rule)
        options = {"rows": case.rows, "kernels": "pallas", **case.rule}
        return expected, route_and_list(logits, bias, valid, **options)

    expected, found = jax.device_get(quick_jit(both)(logits, bias, valid))
    assert_same(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    assert_same(found[2], expected[2])
    assert_same(found[2], oracle(expected[0], case.n_experts, case.rows))


@pytest.mark.parametrize("name", ["v2_lite", "k26"])
def test_rows_do_not_depend_on_their_number_or_place(name):
    """One program for few tokens, two for many: the same bits, softmax sums included."""
    case = next(case for case in SMALL if case.name == name)._replace(n_tokens=17)
    logits, bias, valid = inputs(case)
    both = program(route_and_list, rows=8, **case.rule)
    many = both(logits, bias, valid)
    for rows in (slice(4, 5), slice(1, 17)):
        few = both(logits[rows], bias, valid[rows])
        assert_same(few[:2], (many[0][rows], many[1][rows]))
    alone = program(route, **case.rule)(logits[:4], bias)
    assert_same(alone[1], many[1][:4])


@settings(max_examples=10)
@given(
    st.lists(st.lists(st.integers(-1, 1), min_size=12, max_size=12), min_size=5, max_size=5),
    st.booleans(),
)
def test_ties_go_to_the_lowest_id(grid, negative):
    logits = np.array(grid, np.float32)
    bias = np.full(12, -3 if negative else 0, np.float32)
    rule = CASES[0].rule
    assert_same(program(route, **rule)(logits, bias)[0], reference.route(logits, bias, **rule)[0])


@pytest.mark.parametrize("tokens", [5, 17])
def test_logits_in_parts_and_a_stack_of_biases(tokens):
    case = next(case for case in SMALL if case.has_bias)._replace(n_tokens=tokens)
    logits, bias, valid = inputs(case)
    whole = np.round(64 * logits) / 64  # so that the parts' sum is exact
    parts = np.stack([whole + 3, np.full_like(whole, -2), np.full_like(whole, -1)])
    stack = np.stack([np.full_like(bias, np.nan), bias])
    both = program(route_and_list, rows=8, **case.rule)
    assert_same(both(parts, stack, valid, layer=np.int32(1)), both(whole, bias, valid))
    expected = reference.route_and_list(parts, stack, valid, layer=1, rows=8, **case.rule)
    assert_same(both(whole, bias, valid)[0], expected[0])


def test_idle_rows_may_hold_nan():
    case = SMALL[-1]._replace(n_tokens=5)
    logits, bias, _ = inputs(case)
    valid = np.array([True, False, True, True, False])
    zero, poisoned = logits.copy(), logits.copy()
    zero[~valid], poisoned[~valid] = 0, np.nan
    both = program(route_and_list, rows=8, **case.rule)
    found, expected = both(poisoned, bias, valid), both(zero, bias, valid)
    assert_same((found[0], found[2]), (expected[0], expected[2]))
    assert_same(found[1][valid], expected[1][valid])
    assert (np.asarray(found[0])[~valid] == case.n_experts).all()


def test_nan_scores_give_experts():
    ids = program(route, **KIMI_K26)(np.full((2, 384), np.nan, np.float32), None)[0]
    assert ids.tolist() == [list(range(8))] * 2


@pytest.mark.parametrize(
    ("tokens", "top_k", "n_experts", "rows"),
    [(1, 1, 3, 8), (1, 8, 384, 8), (16, 8, 384, 16), (9, 6, 7, 8), (64, 8, 384, 8), (65, 8, 20, 8)],
)
def test_block_list(tokens, top_k, n_experts, rows):
    """Random, repeated and unknown experts, some with more pairs than a block."""

    @quick_jit
    def both(ids):
        return block_list(ids, n_experts, rows), block_list(ids, n_experts, rows, kernels="pallas")

    rng = np.random.default_rng(tokens)
    crowded = np.minimum(rng.geometric(0.2, (tokens, top_k)) - 1, n_experts)
    wild = rng.choice([-5, n_experts, n_experts + 1, 2**31 - 1, -(2**31)], (tokens, top_k))
    for ids in (
        rng.integers(0, n_experts, (tokens, top_k)),
        crowded,
        np.where(rng.random((tokens, top_k)) < 0.4, wild, crowded),
        np.full((tokens, top_k), n_experts - 1),
        wild,
    ):
        ids = ids.astype(np.int32)
        expected = oracle(ids, n_experts, rows)
        for found in jax.device_get(both(ids)):
            assert_same(found, expected)


@pytest.mark.parametrize("first", [0, 9, 18])
def test_a_rank_lists_its_own_experts(first):
    """Ids count from its first; at 6 and 18 pairs, and at 600, which plain JAX lists."""
    case = next(case for case in SMALL if case.name == "moonlight")._replace(n_experts=27)
    for tokens in (1, 3, 100):
        logits, bias, valid = inputs(case._replace(n_tokens=tokens))
        options = {"rows": 8, "held": 9, **case.rule}
        found = program(route_and_list, **options)(logits, bias, valid, first=np.int32(first))
        everywhere, _ = reference.route(logits, bias, **case.rule)
        wanted = np.where(valid[:, None], np.asarray(everywhere) - first, 9)
        wanted = np.where((wanted >= 0) & (wanted < 9), wanted, 9).astype(np.int32)
        np.testing.assert_array_equal(found[0], wanted)
        assert_same(found[2], oracle(wanted, 9, 8))
        plain = reference.route_and_list(logits, bias, valid, first=first, **options)
        assert_same((found[0], found[2]), (plain[0], plain[2]))


def test_no_launch_beside_the_kernels():
    for tokens, launches in ((1, 1), (17, 2)):
        shapes = (
            jax.ShapeDtypeStruct((tokens, 384), jnp.float32),
            jax.ShapeDtypeStruct((384,), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.bool_),
        )
        text = str(
            jax.make_jaxpr(lambda *args: kernel.route_and_list(*args, rows=8, **KIMI_K26))(*shapes)
        )
        assert text.count("pallas_call[") == launches
