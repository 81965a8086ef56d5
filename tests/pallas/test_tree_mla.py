"""tree_mla and its bit sets against a softmax written out key by key in NumPy."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quick import quick_jit

from k26jax.errors import KernelError
from k26jax.pallas.bits import pack_bits, unpack_bits
from k26jax.pallas.streaming import KEY_BLOCK
from k26jax.pallas.tree_mla import tree_mla

HEADS, LATENT, ROPE, N_LAYERS, LAYER = 3, 12, 4, 2, 1
SCALE = 0.31


def random_tree(rng: np.random.Generator, rows: int) -> np.ndarray:
    """bool [rows, rows]: ancestors and self of a random tree in which parents come first."""
    seen = np.eye(rows, dtype=bool)
    for row in range(1, rows):
        seen[row] |= seen[rng.integers(row)]
    return seen


def words_of(seen: np.ndarray) -> np.ndarray:
    """uint32 words of booleans, by Python's integers."""
    n_words = -(-seen.shape[-1] // 32)
    flat = seen.reshape(-1, seen.shape[-1])
    sums = [sum(1 << int(j) for j in np.flatnonzero(row)) for row in flat]
    words = [[total >> 32 * w & 0xFFFFFFFF for w in range(n_words)] for total in sums]
    return np.array(words, np.uint32).reshape(*seen.shape[:-1], n_words)


class Problem:
    """Random queries over a cache that holds NaN wherever nothing may be read."""

    def __init__(self, lengths, capacity: int, rows: int, slots, n_slots: int, fill=np.nan):
        rng = np.random.default_rng([capacity, rows, *lengths])
        batch = len(lengths)
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.q_latent, self.q_pe = draw(batch, rows, HEADS, LATENT), draw(batch, rows, HEADS, ROPE)
        self.tree_c_kv, self.tree_k_pe = draw(batch, rows, LATENT), draw(batch, rows, ROPE)
        self.c_kv = np.full((N_LAYERS, n_slots, capacity, LATENT), fill, np.float32)
        self.k_pe = np.full((N_LAYERS, n_slots, capacity, ROPE), fill, np.float32)
        for slot, length in zip(slots, lengths, strict=True):
            self.c_kv[LAYER, slot, :length] = draw(length, LATENT)
            self.k_pe[LAYER, slot, :length] = draw(length, ROPE)
        self.slots, self.lengths = np.array(slots, np.int32), np.array(lengths, np.int32)
        self.seen = np.stack([random_tree(rng, rows) for _ in lengths])

    def expected(self) -> np.ndarray:
        out = np.empty(self.q_latent.shape)
        for b, t, h in np.ndindex(out.shape[:3]):
            slot, length, seen = self.slots[b], self.lengths[b], self.seen[b, t]
            latent = [self.c_kv[LAYER, slot, :length], self.tree_c_kv[b, seen]]
            rotary = [self.k_pe[LAYER, slot, :length], self.tree_k_pe[b, seen]]
            latent, rotary = (np.concatenate(x).astype(np.float64) for x in (latent, rotary))
            scores = SCALE * (latent @ self.q_latent[b, t, h] + rotary @ self.q_pe[b, t, h])
            share = np.exp(scores - scores.max())
            out[b, t, h] = share @ latent / share.sum()
        return out

    def run(self, kernels: str = "auto") -> np.ndarray:
        return np.asarray(
            _program(kernels)(
                self.q_latent,
                self.q_pe,
                self.c_kv,
                self.k_pe,
                self.tree_c_kv,
                self.tree_k_pe,
                slots=self.slots,
                lengths=self.lengths,
                ancestors=words_of(self.seen),
            )
        )


@functools.cache
def _program(kernels: str):
    return quick_jit(functools.partial(tree_mla, layer=LAYER, scale=SCALE, kernels=kernels))


LENGTHS = (0, 1, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK, 299)


@pytest.mark.parametrize("rows", [1, 5, 32, 33, 70])
def test_lengths_around_the_key_block(rows):
    """Slots are permuted, two are nobody's, and the capacity is no multiple of the block."""
    slots = [4, 0, 8, 2, 6, 1, 5]
    problem = Problem(LENGTHS, 299, rows, slots, 9)
    found = problem.run()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, problem.expected(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("capacity", [1, 7, KEY_BLOCK, KEY_BLOCK + 1, 3 * KEY_BLOCK])
def test_capacities(capacity):
    lengths = sorted({0, 1, capacity // 2, capacity - 1, capacity})
    slots = list(range(len(lengths)))[::-1]
    problem = Problem(lengths, capacity, 4, slots, len(slots))
    np.testing.assert_allclose(problem.run(), problem.expected(), rtol=0, atol=3e-6)


def test_nothing_cached_at_all():
    problem = Problem([0, 0], 5, 6, [1, 0], 2)
    np.testing.assert_allclose(problem.run(), problem.expected(), rtol=0, atol=3e-6)


def test_unused_rows_do_not_matter():
    arguments = ([3, 200, KEY_BLOCK], 299, 6, [2, 0, 1], 4)
    zeros, nan = Problem(*arguments, fill=0.0), Problem(*arguments)
    np.testing.assert_array_equal(zeros.run(), nan.run())
    np.testing.assert_array_equal(Problem(*arguments, fill=np.inf).run(), nan.run())


def test_unseen_tree_rows_do_not_matter():
    """Rows that nobody but themselves sees may be NaN, as those of padding nodes are."""
    problem = Problem([130, 4], 150, 6, [1, 0], 2)
    problem.seen[:, :, 5] = False
    problem.seen[:, 5, 5] = True
    clean = problem.run()
    for name in ("q_latent", "q_pe", "tree_c_kv", "tree_k_pe"):
        getattr(problem, name)[:, 5] = 1e30
    np.testing.assert_array_equal(problem.run()[:, :5], clean[:, :5])


def test_large_scores():
    """Scores of both signs far beyond float32's exponent range after exp."""
    problem = Problem([260, 1], 299, 5, [0, 1], 2)
    problem.q_latent *= 300
    np.testing.assert_allclose(problem.run(), problem.expected(), rtol=0, atol=2e-4)


def test_bits():
    rng = np.random.default_rng(2)
    for n in (1, 32, 65):
        flags = rng.random((3, 2, n)) < 0.5
        words = words_of(flags)
        np.testing.assert_array_equal(np.asarray(pack_bits(jnp.asarray(flags))), words)
        np.testing.assert_array_equal(np.asarray(unpack_bits(jnp.asarray(words), n)), flags)


def test_named_choice():
    problem = Problem([3], 8, 2, [0], 1)
    np.testing.assert_array_equal(problem.run("reference"), problem.run())
    with pytest.raises(KernelError, match=r"tree_mla.*'mosaic'"):
        problem.run("mosaic")
