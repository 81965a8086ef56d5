"""What all products share: steps over a sum, and blocks of rows that may not exist."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k26jax.pallas.gpu import Tile

Load = Callable[[Any], tuple[jax.Array, list[jax.Array]]]


def steps_of(k: int, tile: Tile) -> tuple[int, int]:
    """Returns the depth of a step and its number of sums, no more than a sum of k needs."""
    depth = max(16, min(tile.depth, pl.next_power_of_2(k)))
    return depth, min(tile.splits, pl.cdiv(k, depth))


def accumulate(
    load: Load,
    k: int,
    depth: int,
    splits: int,
    zeros: Sequence[jax.Array],
    part: jax.Array | int = 0,
    parts: int = 1,
) -> list[jax.Array]:
    """Returns the products over one part of the depth, one for each weight, in float32.

    Args:
      load: first element -> the rows [rows, depth] and each weight [depth, columns].
      part, parts: which part, of how many.
    """

    def step(number, sums):
        added = []
        for split in range(splits):
            x, weights = load((number * splits + split) * depth)
            precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            for weight in weights:
                product = jnp.dot(
                    x, weight, precision=precision, preferred_element_type=jnp.float32
                )
                added.append(sums[len(added)] + product)
        return tuple(added)

    n_steps = pl.cdiv(k, depth * splits)
    each = pl.cdiv(n_steps, parts)
    last = n_steps if parts == 1 else jnp.minimum((part + 1) * each, n_steps)
    sums = lax.fori_loop(part * each, last, step, tuple(zeros) * splits)
    n = len(zeros)
    return [functools.reduce(jnp.add, sums[index::n]) for index in range(n)]


def exists_mask(first, size: int, count: int) -> jax.Array:
    return first + jnp.arange(size) < count


def load_block(ref, row_exists: jax.Array | None, column_exists: jax.Array | None) -> jax.Array:
    """Returns a block of two axes, zero where either does not exist; None: all does."""
    mask = None
    if row_exists is not None:
        mask = jnp.broadcast_to(row_exists[:, None], ref.shape)
    if column_exists is not None:
        columns = jnp.broadcast_to(column_exists[None, :], ref.shape)
        mask = columns if mask is None else mask & columns
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0.0)
