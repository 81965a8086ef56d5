"""Trees of one launch against the trees of the specification, bit for bit."""

import functools

import jax
import numpy as np
import pytest
from fixtures.quick import quick_jit
from hypothesis import given, settings
from hypothesis import strategies as st

from k26jax.errors import KernelError
from k26jax.pallas.tree_build import build
from k26jax.pallas.tree_build.cases import CASES
from k26jax.spec.tree import build_tree

SMALL = [case for case in CASES if case.is_small]
KINDS = ("equal", "ties", "spread", "ended", "far apart", "inexact")


def a_table(case, kind: str, seed: int):
    rng = np.random.default_rng(seed)
    shape = case.slots, case.depths, case.width
    gaps = rng.integers(0, {"equal": 1, "spread": 1000}.get(kind, 3), shape).astype(np.float64)
    gaps[..., 0] *= rng.random(shape[:2]) < 0.5
    log_probs = -np.cumsum(gaps, axis=-1) / 1024
    if kind == "ended":
        end = rng.integers(0, case.width + 1, (*shape[:2], 1))
        log_probs[np.arange(case.width) == end] = rng.choice([np.nan, -np.inf, np.inf])
    if kind == "far apart":  # sums of more bits than float32 has, subnormal terms
        log_probs = np.ldexp(log_probs, rng.choice([-130, -100, -20, 60], (*shape[:2], 1)))
    if kind == "inexact":
        log_probs = np.sort(-(2.0 ** rng.uniform(-30, 3, shape)))[..., ::-1]
    token_ids = np.argsort(rng.random((*shape[:2], max(case.width, 300))), axis=-1)
    root = rng.integers(1, 1000, case.slots)
    return (
        log_probs.astype(np.float32),
        token_ids[..., : case.width].astype(np.int32),
        root.astype(np.int32),
    )


@functools.cache
def programs(case):
    def expected(log_probs, token_ids, root):
        trees = jax.vmap(functools.partial(build_tree, budget=case.budget))(log_probs, token_ids)
        return trees.with_root(root)

    def found(*table):
        kinds = ("pallas", "reference")
        return [build(*table, case.budget, kernels=kernels) for kernels in kinds]

    return quick_jit(expected), quick_jit(found)


def check(case, table) -> None:
    expected, found = (jax.device_get(program(*table)) for program in programs(case))
    for nodes in found:
        for name in ("token_ids", "parent", "depth", "valid", "ancestors"):
            one, other = getattr(nodes, name), getattr(expected, name)
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, name)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_equals_build_tree(case):
    for seed, kind in enumerate(KINDS):
        check(case, a_table(case, kind, seed))


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS))
def test_any_table(seed, kind):
    check(SMALL[2], a_table(SMALL[2], kind, seed))


def test_neighbours_do_not_matter():
    case = SMALL[0]
    log_probs, token_ids, root = a_table(case, "ties", 1)
    _, found = programs(case)
    before = found(log_probs, token_ids, root)[0]
    log_probs[1] = np.nan
    after = found(log_probs, token_ids, root)[0]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[::2], other[::2])
    assert after.valid[1].tolist() == [True] + [False] * case.budget


@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 3, 0)])
def test_no_candidates_give_the_root(shape):
    log_probs, token_ids = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    nodes = build(log_probs, token_ids, np.array([7, 9], np.int32), 3, kernels="pallas")
    assert nodes.valid.tolist() == [[True, False, False, False]] * 2
    assert nodes.token_ids.tolist() == [[7, 0, 0, 0], [9, 0, 0, 0]]
    assert nodes.ancestors[..., 0].tolist() == [[1, 2, 4, 8]] * 2


def test_named_choice():
    table = a_table(SMALL[0], "ties", 0)
    with pytest.raises(KernelError, match=r"tree_build.*'triton'"):
        build(*table, 7, kernels="triton")
