"""The tree_mla kernel, interpreted: against the reference, and bit for bit against itself.

Key blocks and splits are small, so that short contexts cross many of them.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quick import quick_jit
from fixtures.tree_mla import (
    LAYER,
    SCALE,
    SMALL_TIERS,
    TILE,
    Problem,
    random_tree,
    words_of,
)

from k26jax.errors import KernelError
from k26jax.pallas.bits import pack_bits, paths
from k26jax.pallas.tree_mla import kernel, tree_mla
from k26jax.pallas.tree_mla.cases import SMALL_CASES
from k26jax.pallas.tree_mla.programs import job_of
from k26jax.pallas.tree_mla.splits import HOPPER_TIERS, TIERS, split_of, split_start

# Boundaries of the splits: 32, 64, 128, 192, 288.
LENGTHS = (0, 17, 64, 100, 191)
CROSSING = SMALL_CASES[0]._replace(rows=40, lengths=LENGTHS, capacity=240)


@functools.cache
def crossing(dtype: str):
    """A problem whose paths reach over one or two split boundaries, and its result."""
    problem = Problem(CROSSING, dtype, depth=36)
    return problem, problem.run()


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_equal_to_the_reference(case):
    problem = Problem(case)
    found = problem.run()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, problem.run("reference"), rtol=0, atol=3e-6)


def test_table_tiles_and_splits():
    """The tile and the partition that a GPU takes."""
    problem = Problem(SMALL_CASES[-1])
    program = quick_jit(functools.partial(tree_mla, layer=LAYER, scale=SCALE, kernels="pallas"))
    found = np.asarray(
        program(
            *(problem.q_latent, problem.q_pe, problem.c_kv, problem.k_pe),
            *(problem.tree_c_kv, problem.tree_k_pe),
            slots=problem.slots,
            lengths=problem.lengths,
            ancestors=words_of(problem.seen),
        )
    )
    np.testing.assert_allclose(found, problem.run("reference"), rtol=0, atol=3e-6)


def test_bfloat16_near_the_reference():
    problem, found = crossing("bfloat16")
    np.testing.assert_allclose(found, problem.run("reference"), rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tree_row_has_the_bits_of_plain_decoding(dtype):
    problem, found = crossing(dtype)
    rows = [0, 1, 2, 16, 31, 35, 37, 39]
    plain = problem.plain(rows)
    assert plain.lengths.max() - problem.lengths.max() == 35
    np.testing.assert_array_equal(plain.run(), found[:, rows].reshape(-1, 1, *found.shape[2:]))


def test_rows_do_not_depend_on_their_number():
    problem, found = crossing("float32")
    rows = 17
    names = ("q_latent", "q_pe", "tree_c_kv", "tree_k_pe")
    fields = {name: getattr(problem, name)[:, :rows] for name in names}
    fewer = problem.changed(**fields, seen=problem.seen[:, :rows, :rows])
    np.testing.assert_array_equal(fewer.run(), found[:, :rows])


def test_pages_hold_the_same_bits():
    problem, found = crossing("float32")
    paged = problem.in_pages(16)
    np.testing.assert_array_equal(paged.run(), found)
    np.testing.assert_allclose(paged.run("reference"), found, rtol=0, atol=3e-6)


def test_a_page_may_stand_in_several_rows():
    problem = Problem(CROSSING)
    for cache in (problem.c_kv, problem.k_pe):
        cache[:, problem.slots[4], :64] = cache[:, problem.slots[3], :64]
    paged = problem.in_pages(16)
    paged.page_table[4, :4] = paged.page_table[3, :4]
    np.testing.assert_array_equal(paged.run(), problem.run())


def test_pages_smaller_than_a_key_block_are_refused():
    with pytest.raises(KernelError, match="pages of 8 rows"):
        Problem(SMALL_CASES[0]).in_pages(8).run()


def test_tree_rows_out_of_sight_may_be_nan():
    problem, found = crossing("float32")
    poisoned = problem.changed()
    leaf = np.flatnonzero(problem.seen.any(axis=0).sum(axis=0) == 1)[-1]
    for name in ("q_latent", "q_pe", "tree_c_kv", "tree_k_pe"):
        array = getattr(problem, name).copy()
        array[:, leaf] = np.nan
        setattr(poisoned, name, array)
    clean = np.arange(found.shape[1]) != leaf
    again = poisoned.run()
    np.testing.assert_array_equal(again[:, clean], found[:, clean])
    assert np.isnan(again[:, leaf]).all()


@pytest.mark.parametrize(("tiers", "n_splits"), [(TIERS, 256), (HOPPER_TIERS, 312)])
def test_splits(tiers, n_splits):
    """Every position lies in the split that says so, and blocks never straddle two."""
    position = np.arange(300_000)
    split = split_of(position, tiers, np)
    assert split[0] == 0
    assert set(np.diff(split)) == {0, 1}
    start = split_start(split, tiers, np)
    assert (start <= position).all()
    assert (position < split_start(split + 1, tiers, np)).all()
    assert (start % 64 == 0).all()
    np.testing.assert_array_equal(np.flatnonzero(np.diff(split)) + 1, np.unique(start)[1:])
    assert split[262_143] == n_splits - 1
    for number in (0, 8191, 8192, 262_143):
        assert int(split_of(jnp.int32(number), tiers)) == split[number]
        assert int(split_start(jnp.int32(split[number]), tiers)) == start[number]


@pytest.mark.parametrize(("tokens", "heads"), [(1, 8), (5, 2), (40, 8)])
def test_programs_write_what_the_merge_reads(tokens, heads):
    """Each part of each row by one program, and the parts of a row are its positions in order."""
    tiers, capacity, piece = SMALL_TIERS, 500, 32
    lengths = np.array([0, 31, 32, 100, 160, 191, 192, 287, 288, 460], np.int32)
    last = lengths[:, None] + np.minimum(np.arange(tokens), 36)
    cache: Any = jax.ShapeDtypeStruct((1, len(lengths), capacity, 64), jnp.float32)
    query: Any = jax.ShapeDtypeStruct((len(lengths), tokens, heads, 64), jnp.float32)
    shape = kernel.shape_of(query, cache, None, 1.0, TILE, tiers)

    def job(program):
        job = job_of(program, jnp.asarray(lengths), lambda *at: jnp.asarray(last)[at], shape)
        return {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}

    jobs = quick_jit(jax.vmap(job))(jnp.arange(shape.programs))
    jobs = {name: np.asarray(field)[np.asarray(jobs["needed"])] for name, field in jobs.items()}
    assert jobs["part"].max() < shape.n_parts
    height = np.where(jobs["is_tail"], np.minimum(heads, TILE.rows), TILE.rows)
    for sequence, token in np.ndindex(last.shape):
        end, length = last[sequence, token] + 1, lengths[sequence]
        n_whole = split_of(end - 1, tiers, np)
        cut = range(split_start(n_whole, tiers, np), end, piece)
        later = shape.n_pieces * (n_whole > split_of(length, tiers, np))
        parts = [*range(n_whole), *(shape.n_splits + later + i for i in range(len(cut)))]
        starts = [*(split_start(i, tiers, np) for i in range(n_whole)), *cut, end]
        for row in (token * heads, token * heads + heads - 1):
            is_row = (jobs["first_row"] <= row) & (row < jobs["first_row"] + height)
            is_row &= jobs["sequence"] == sequence
            for part, (begin, after) in zip(parts, itertools.pairwise(starts), strict=True):
                (which,) = np.flatnonzero(is_row & (jobs["part"] == part))
                assert jobs["begin"][which] == begin
                assert min(jobs["end"][which], end) == after
                assert jobs["is_tail"][which] == (after > length)


@pytest.mark.parametrize("rows", [1, 33, 255])
def test_paths(rows):
    rng = np.random.default_rng(rows)
    seen = np.stack([random_tree(rng, rows, depth) for depth in (0, rows)])
    expected = np.full((2, rows, rows + 3), -1)
    for b, row in np.ndindex(2, rows):
        ancestors = np.flatnonzero(seen[b, row])
        expected[b, row, : len(ancestors)] = ancestors
    found = quick_jit(lambda bits: paths(pack_bits(bits), rows + 3))(seen)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(found), expected)
