"""The best tokens of rows of logits against a stable sort in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quick import quick_jit

from k26jax.errors import KernelError
from k26jax.pallas.gpu import Tile
from k26jax.pallas.vocab_topk import best_token, reference, top_tokens
from k26jax.pallas.vocab_topk.cases import CASES

SMALL = [case for case in CASES if case.is_small]


def some_logits(case, kind: str) -> np.ndarray:
    rng = np.random.default_rng(case.width)
    logits = (3 * rng.standard_normal((case.rows, case.width))).astype(np.float32)
    if kind == "ties":
        return np.round(logits / 4)  # zeros of both signs
    if kind == "infinite":
        return rng.choice([-np.inf, -1, 2], logits.shape).astype(np.float32)
    if kind == "equal":
        return np.full_like(logits, -7)
    if kind == "large":
        return logits * 1e37
    return logits


def check(found, logits: np.ndarray, count: int) -> None:
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(found.ids, order)
    top = np.take_along_axis(logits, order, axis=1)
    np.testing.assert_array_equal(found.logits, top)
    wide = logits.astype(np.float64)
    highest = wide.max(axis=1, keepdims=True)
    total = highest + np.log(np.exp(wide - highest).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found.log_total, total[:, 0], rtol=1e-6, atol=1e-6)
    near = 1e-6 * np.abs(highest).max() + 1e-6
    np.testing.assert_allclose(found.log_probs, top - total, rtol=1e-6, atol=near)


@functools.cache
def program(case):
    @quick_jit
    def run(logits):
        tile = Tile(columns=case.columns)
        few = top_tokens(logits, case.count, kernels="pallas", scan_tile=tile)
        return few, best_token(logits, kernels="pallas", tile=tile)

    return run


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_equals_sort(case):
    for kind in ("normal", "ties", "infinite", "equal", "large"):
        logits = some_logits(case, kind)
        top, (ids, best) = jax.device_get(program(case)(logits))
        check(top, logits, case.count)
        check(jax.device_get(reference.top_tokens(logits, case.count)), logits, case.count)
        assert (ids.dtype, best.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(ids, logits.argmax(axis=1))
        np.testing.assert_array_equal(best, logits.max(axis=1))


def test_rows_do_not_depend_on_their_number_place_or_neighbours():
    case = next(case for case in SMALL if case.rows == 4)
    logits = some_logits(case, "normal")
    many = program(case)(logits)
    poisoned = logits.copy()
    poisoned[[0, 2]] = np.nan
    for rows, given in ((slice(3, 4), logits), (slice(1, 2), poisoned)):
        few = program(case)(given[rows])
        for one, other in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True):
            np.testing.assert_array_equal(one, other[rows])
    for one, other in zip(*map(jax.tree.leaves, (program(case)(poisoned), many)), strict=True):
        np.testing.assert_array_equal(one[1::2], other[1::2])


def test_a_row_without_a_finite_logit_has_no_log_probs():
    case = next(case for case in SMALL if case.rows == 4)
    logits = some_logits(case, "normal")
    logits[2] = -np.inf
    top, (ids, _) = jax.device_get(program(case)(logits))
    assert top.ids[2].tolist() == list(range(case.count))
    assert not np.isfinite(top.log_probs[2]).any()
    assert np.isfinite(top.log_probs[[0, 1, 3]]).all()
    assert ids[2] == 0


def test_the_first_nan_is_the_best():
    case = next(case for case in SMALL if case.rows == 4)
    logits = some_logits(case, "normal")
    logits[1, [700, 300]] = np.nan
    ids, best = program(case)(logits)[1]
    assert ids[1] == 300
    assert np.isnan(best[1])


def test_bfloat16_logits():
    case = next(case for case in SMALL if case.rows == 4)
    logits = jnp.asarray(some_logits(case, "normal"), jnp.bfloat16)
    top, (ids, _) = jax.device_get(program(case)(logits))
    wide = np.asarray(logits, np.float32)
    check(top, wide, case.count)
    np.testing.assert_array_equal(ids, wide.argmax(axis=1))


def test_named_choice():
    logits = some_logits(SMALL[0], "normal")
    np.testing.assert_array_equal(best_token(logits)[0], logits.argmax(axis=1))
    with pytest.raises(KernelError, match=r"top_tokens.*'triton'"):
        top_tokens(logits, 3, kernels="triton")
