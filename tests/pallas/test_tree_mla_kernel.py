"""The tree_mla kernel, interpreted: against the reference, and bit for bit against itself.

Key blocks and splits are small, so that short contexts cross many of them.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quick import quick_jit

from k26jax.errors import KernelError
from k26jax.pallas.bits import pack_bits, paths
from k26jax.pallas.gpu import Tile
from k26jax.pallas.tree_mla import kernel, reference, tree_mla
from k26jax.pallas.tree_mla.cases import SMALL_CASES
from k26jax.pallas.tree_mla.splits import TIERS, split_of, split_start

LAYER, SCALE = 1, 0.31
TILE = Tile(rows=16, columns=16)
MERGE_TILE = Tile(columns=16, splits=2)
SMALL_TIERS = ((32, 2), (64, 2), (96, 1 << 20))
# Boundaries of these splits: 32, 64, 128, 192, 288.
LENGTHS = (0, 17, 64, 100, 191)


@functools.cache
def _program(which: str):
    options = {} if which == "reference" else {"tile": TILE, "merge_tile": MERGE_TILE}
    if which == "pallas":
        options["tiers"] = SMALL_TIERS
    operation = {"reference": reference.tree_mla}.get(which, kernel.tree_mla)
    return quick_jit(functools.partial(operation, layer=LAYER, scale=SCALE, **options))


def _words(seen: np.ndarray) -> np.ndarray:
    padded = np.pad(seen, [(0, 0), (0, 0), (0, -seen.shape[-1] % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4")


def random_tree(rng: np.random.Generator, rows: int, depth: int) -> np.ndarray:
    """bool [rows, rows]: ancestors and self; the first `depth` rows are a chain."""
    seen = np.eye(rows, dtype=bool)
    for row in range(1, rows):
        seen[row] |= seen[row - 1 if row < depth else rng.integers(row)]
    return seen


class Problem:
    """Arguments of one call; cache rows out of use hold NaN, as do the other layer's."""

    def __init__(self, case, dtype="float32", seed=0, depth=0):
        _, rows, heads, lengths, capacity, latent, rope, _ = case
        rng = np.random.default_rng(seed)
        batch = len(lengths)
        draw = lambda *shape: np.asarray(rng.standard_normal(shape), jnp.dtype(dtype))  # noqa: E731
        self.q_latent, self.q_pe = draw(batch, rows, heads, latent), draw(batch, rows, heads, rope)
        self.tree_c_kv, self.tree_k_pe = draw(batch, rows, latent), draw(batch, rows, rope)
        self.c_kv, self.k_pe = draw(2, batch, capacity, latent), draw(2, batch, capacity, rope)
        self.slots = rng.permutation(batch).astype(np.int32)
        self.lengths = np.array(lengths, np.int32)
        for cache in (self.c_kv, self.k_pe):
            cache[1 - LAYER] = np.nan
            for slot, length in zip(self.slots, lengths, strict=True):
                cache[:, slot, length:] = np.nan
        self.seen = np.stack([random_tree(rng, rows, depth) for _ in lengths])
        self.page_table = None

    def run(self, which: str = "pallas") -> np.ndarray:
        paged = {} if self.page_table is None else {"page_table": self.page_table}
        return np.asarray(
            _program(which)(
                self.q_latent,
                self.q_pe,
                self.c_kv,
                self.k_pe,
                self.tree_c_kv,
                self.tree_k_pe,
                slots=self.slots,
                lengths=self.lengths,
                ancestors=_words(self.seen),
                **paged,
            )
        )

    def changed(self, **fields) -> "Problem":
        """A copy with other fields."""
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__ | fields)
        return other

    def plain(self, rows: list[int]) -> "Problem":
        """Tree rows as the only row of a call each, their ancestors committed to the cache."""
        each = np.repeat(np.arange(len(self.lengths)), len(rows))
        row = np.tile(rows, len(self.lengths))
        names = ("q_latent", "q_pe", "tree_c_kv", "tree_k_pe")
        other = self.changed(
            **{name: getattr(self, name)[each, row][:, None] for name in names},
            c_kv=self.c_kv[:, self.slots[each]],
            k_pe=self.k_pe[:, self.slots[each]],
            slots=np.arange(len(each), dtype=np.int32),
            seen=np.ones((len(each), 1, 1), bool),
            lengths=self.lengths[each],
        )
        for index, (b, t) in enumerate(zip(each, row, strict=True)):
            ancestors = np.flatnonzero(self.seen[b, t])[:-1]
            place = slice(self.lengths[b], self.lengths[b] + len(ancestors))
            other.c_kv[LAYER, index, place] = self.tree_c_kv[b, ancestors]
            other.k_pe[LAYER, index, place] = self.tree_k_pe[b, ancestors]
            other.lengths[index] += len(ancestors)
        return other

    def in_pages(self, size: int) -> "Problem":
        """The same in pages that lie anywhere; nobody's pages hold NaN."""
        other = self.changed()
        batch, capacity = self.c_kv.shape[1:3]
        n_pages = capacity // size
        order = np.random.default_rng(1).permutation(batch * n_pages) + 1
        other.page_table = order.reshape(batch, n_pages).astype(np.int32)
        for name in ("c_kv", "k_pe"):
            cache = getattr(self, name)
            pages = np.full((2, batch * n_pages + 2, size, cache.shape[-1]), np.nan, cache.dtype)
            split = cache[:, self.slots].reshape(2, batch, n_pages, size, -1)
            pages[:, other.page_table] = split
            setattr(other, name, pages)
        used = -(-self.lengths // size)[:, None]
        other.page_table[np.arange(n_pages) >= used] = 1 << 29
        other.slots = np.full(batch, 1 << 29, np.int32)
        return other


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
            ancestors=_words(problem.seen),
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


def test_splits():
    """Every position lies in the split that says so, and blocks never straddle two."""
    position = np.arange(300_000)
    split = split_of(position, TIERS, np)
    assert split[0] == 0
    assert set(np.diff(split)) == {0, 1}
    start = split_start(split, TIERS, np)
    assert (start <= position).all()
    assert (position < split_start(split + 1, TIERS, np)).all()
    assert (start % 64 == 0).all()
    np.testing.assert_array_equal(np.flatnonzero(np.diff(split)) + 1, np.unique(start)[1:])
    assert split[262_143] == 255
    for number in (0, 8191, 8192, 262_143):
        assert int(split_of(jnp.int32(number))) == split[number]
        assert int(split_start(jnp.int32(split[number]))) == start[number]


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
