"""The draft_attention kernel, interpreted: against an oracle key by key, and bit for bit.

Key blocks and splits are small, so that short contexts cross many of them.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quick import quick_jit
from model.drafter_oracle import grouped_attention, visible

from k26jax.pallas.draft_attention import draft_attention
from k26jax.pallas.draft_attention.cases import SMALL_CASES, Case
from k26jax.pallas.draft_attention.kernel import tiers_for
from k26jax.pallas.gpu import Tile
from k26jax.pallas.tiles import TILES
from k26jax.pallas.tree_mla.splits import TIERS, split_start

LAYER, LAYERS, SCALE = 1, 2, 0.31
TILING = {
    "tile": Tile(rows=64, columns=16, warps=8),
    "merge_tile": Tile(splits=2),
    "tiers": ((32, 2), (64, 1), (96, 1 << 20)),
}
SMALL = [pytest.param(case, id=case.name) for case in SMALL_CASES]
CROSSING = Case("crossing", 3, 4, 2, 16, (0, 1, 31, 32, 33, 64, 65, 128, 129, 230), 240)


class Problem:
    """Arguments of one call; cache rows out of use hold `fill`, as does the other layer."""

    def __init__(self, case: Case, fill: float = np.nan, dtype: str = "float32"):
        rng = np.random.default_rng(1)
        self.case, batch = case, len(case.lengths)

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(jnp.dtype(dtype))

        self.query = draw(batch, case.rows, case.heads, case.width)
        self.caches = [
            draw(LAYERS, batch, case.capacity, case.kv_heads, case.width) for _ in range(2)
        ]
        for cache in self.caches:
            cache[1 - LAYER] = fill
            for slot, length in enumerate(case.lengths):
                cache[LAYER, slot, length:] = fill
        self.block = [draw(batch, case.rows, case.kv_heads, case.width) for _ in range(2)]

    def run(self, kernels: str = "pallas", slots: Any = slice(None), tiling=None) -> np.ndarray:
        is_reference = kernels == "reference"
        options = {"layer": LAYER} if is_reference else TILING if tiling is None else tiling
        program = _program(self.case.window, self.case.causal, kernels, tuple(options.items()))
        traced = {} if is_reference else {"layer": np.int32(LAYER)}
        return np.asarray(
            program(
                self.query[slots],
                *(cache[:, slots] for cache in self.caches),
                *(rows[slots] for rows in self.block),
                **traced,
                lengths=np.array(self.case.lengths, np.int32)[slots],
            )
        )

    def seen(self, which: int, slot: int) -> np.ndarray:
        """Keys (0) or values (1) of the context and the block."""
        context = self.caches[which][LAYER, slot, : self.case.lengths[slot]]
        return np.concatenate([context, self.block[which][slot]])

    def oracle(self) -> np.ndarray:
        case, slots = self.case, range(len(self.case.lengths))
        return np.stack(
            [
                grouped_attention(
                    self.query[slot].astype(np.float64),
                    self.seen(0, slot),
                    self.seen(1, slot),
                    visible(case.lengths[slot], case.rows, case.window, case.causal),
                    SCALE,
                )
                for slot in slots
            ]
        )


@functools.cache
def _program(window: int | None, causal: bool, kernels: str, options: tuple):
    return quick_jit(
        functools.partial(
            draft_attention,
            window=window,
            causal=causal,
            scale=SCALE,
            kernels=kernels,
            **dict(options),
        )
    )


@pytest.mark.parametrize("case", SMALL)
def test_equal_to_the_oracle(case):
    problem = Problem(case)
    found = problem.run()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, problem.oracle(), rtol=0, atol=3e-6)


@pytest.mark.parametrize(("window", "causal"), [(None, True), (2, False), (66, False)])
def test_windows_across_splits(window, causal):
    problem = Problem(CROSSING._replace(window=window, causal=causal))
    np.testing.assert_allclose(problem.run(), problem.oracle(), rtol=0, atol=3e-6)


def test_table_tiles_and_splits():
    """The tile and the partition that a GPU takes."""
    problem = Problem(CROSSING._replace(lengths=(0, 127, 300), capacity=300, window=140))
    np.testing.assert_allclose(problem.run(tiling={}), problem.oracle(), rtol=0, atol=3e-6)


def test_bfloat16_near_the_reference():
    problem = Problem(CROSSING._replace(window=100), dtype="bfloat16")
    np.testing.assert_allclose(problem.run(), problem.run("reference"), rtol=0, atol=2e-2)


@pytest.mark.parametrize("window", [None, 66])
def test_unused_rows_do_not_matter(window):
    case = CROSSING._replace(window=window)
    nan = Problem(case).run()
    assert np.isfinite(nan).all()
    np.testing.assert_array_equal(Problem(case, np.inf).run(), nan)
    np.testing.assert_array_equal(Problem(case, 0.0).run(), nan)


def test_rows_do_not_depend_on_the_batch():
    problem = Problem(CROSSING._replace(window=100), dtype="bfloat16")
    found = problem.run()
    for slots in ([9], [8, 8, 3, 7, 1]):
        np.testing.assert_array_equal(problem.run(slots=slots), found[slots])


def test_rows_do_not_depend_on_the_capacity():
    problem = Problem(CROSSING)
    found = problem.run()
    problem.caches = [
        np.pad(cache, [(0, 0), (0, 0), (0, 300), (0, 0), (0, 0)], constant_values=np.nan)
        for cache in problem.caches
    ]
    np.testing.assert_array_equal(problem.run(), found)


def test_context_below_the_window_may_hold_anything():
    case = CROSSING._replace(lengths=(230, 129), window=50)
    problem = Problem(case)
    found = problem.run()
    for cache in problem.caches:
        for slot, length in enumerate(case.lengths):
            cache[LAYER, slot, : length - 49] = np.nan
    np.testing.assert_array_equal(problem.run(), found)
    problem.caches[0][LAYER, 0, 230 - 49] = np.nan
    assert np.isnan(problem.run()[0, 0]).all()


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 100])
def test_partition(kv_heads):
    """Sizes ascend, and each is a whole number of the key blocks of every tile."""
    tiers = tiers_for(kv_heads)
    starts = np.array([int(split_start(split, tiers, np)) for split in range(300)])
    sizes = np.diff(starts)
    assert starts[0] == 0
    assert (np.diff(sizes) >= 0).all()
    assert not (sizes % max(tile.columns for tile in TILES["draft_attention"].values())).any()
    assert sizes[-1] == TIERS[-1][0]
