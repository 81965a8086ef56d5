"""draft_attention against a softmax written out key by key: windows, causality, blocks of keys."""

import functools

import numpy as np
import pytest
from fixtures.quick import quick_jit
from model.drafter_oracle import grouped_attention, visible

from k26jax.errors import KernelError
from k26jax.pallas.draft_attention import draft_attention
from k26jax.pallas.streaming import KEY_BLOCK

HEADS, KV_HEADS, WIDTH, N_LAYERS, LAYER = 4, 2, 8, 2, 1
LENGTHS = (0, 1, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 299)
CAPACITY = 299


@functools.cache
def problem(rows: int, fill: float):
    rng = np.random.default_rng(rows)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    caches = []
    for _ in range(2):
        cache = np.full((N_LAYERS, len(LENGTHS), CAPACITY, KV_HEADS, WIDTH), fill, np.float32)
        for slot, length in enumerate(LENGTHS):
            cache[LAYER, slot, :length] = draw(length, KV_HEADS, WIDTH)
        caches.append(cache)
    block = [draw(len(LENGTHS), rows, KV_HEADS, WIDTH) for _ in range(2)]
    return draw(len(LENGTHS), rows, HEADS, WIDTH), *caches, *block


def run(arrays, window: int | None, causal: bool, kernels: str = "auto") -> np.ndarray:
    program = _program(window=window, causal=causal, kernels=kernels)
    return np.asarray(program(*arrays, lengths=np.array(LENGTHS, np.int32)))


@functools.cache
def _program(**options):
    return quick_jit(functools.partial(draft_attention, layer=LAYER, scale=WIDTH**-0.5, **options))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, KEY_BLOCK + 2, 1000])
def test_masks(window, causal):
    """Every row of every length sees exactly what the rule says."""
    rows = 6
    query, keys, values, block_keys, block_values = arrays = problem(rows, np.nan)
    found = run(arrays, window, causal)
    assert found.dtype == np.float32
    for slot, length in enumerate(LENGTHS):
        expected = grouped_attention(
            query[slot].astype(np.float64),
            np.concatenate([keys[LAYER, slot, :length], block_keys[slot]]),
            np.concatenate([values[LAYER, slot, :length], block_values[slot]]),
            visible(length, rows, window, causal),
            WIDTH**-0.5,
        )
        np.testing.assert_allclose(found[slot], expected, rtol=0, atol=3e-6, err_msg=str(length))


def test_the_rule_itself():
    """The oracle's masks by hand: two context positions, then three block rows."""
    full = [[1, 1, 1, 1, 1]] * 3
    causal = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    near = [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    causal_near = [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert visible(2, 3, None, False).astype(int).tolist() == full
    assert visible(2, 3, None, True).astype(int).tolist() == causal
    assert visible(2, 3, 2, False).astype(int).tolist() == near
    assert visible(2, 3, 2, True).astype(int).tolist() == causal_near


@pytest.mark.parametrize("window", [None, 3])
def test_unused_rows_do_not_matter(window):
    nan = run(problem(4, np.nan), window, False)
    np.testing.assert_array_equal(nan, run(problem(4, 0.0), window, False))
    np.testing.assert_array_equal(nan, run(problem(4, np.inf), window, False))


def test_named_choice():
    arrays = problem(4, 0.0)
    np.testing.assert_array_equal(run(arrays, 3, True, "reference"), run(arrays, 3, True))
    with pytest.raises(KernelError, match=r"draft_attention.*'mosaic'"):
        run(arrays, 3, True, "mosaic")
