"""The one partition of positions into parts, whose partial results are merged in order.

A split is a run of positions that starts and ends at fixed places, whatever the length, the tree,
the batch and the capacity. A row takes the splits below its last position whole, and the one that
holds it in pieces. So the parts of a row follow from its last position alone, and a position stands
at the same place of the same sum in every call; and what is left to one program in the row's last
split is a piece, however long that split is.
"""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

# (size, count) in order of position; sizes are multiples of every key block, and of the first size,
# which is that of a piece. A split grows with its position: then the splits of a context of any
# length keep all cores of a GPU busy for about the same time. The last count is without end.
Tiers = tuple[tuple[int, int], ...]
TIERS: Tiers = ((128, 64), (384, 64), (1536, 64), (2048, 1 << 20))
# Of the kernel for Hopper: few enough at 4k and 32k for one wave of programs at 16 rows of 8 heads,
# two tiles of rows, whose partial results cost as much as the keys; enough for one row.
HOPPER_TIERS: Tiers = ((128, 32), (512, 56), (1024, 1 << 20))


def split_of(position: Any, tiers: Tiers = TIERS, xp: ModuleType = jnp) -> Any:
    """Returns the split that holds a position; with `xp` NumPy, of a number."""
    index, start = 0, 0
    for number, (size, count) in enumerate(tiers, 1):
        held = xp.maximum(position, start) - start
        # Every program of a kernel comes through here before its first load, so no more than need
        # be: rounding towards zero is a shift, and nothing is behind the last tier.
        index_here = held // size if xp is np else lax.div(held, size)
        index += index_here if number == len(tiers) else xp.minimum(index_here, count)
        start += size * count
    return index


def split_start(split: Any, tiers: Tiers = TIERS, xp: ModuleType = jnp) -> Any:
    """Returns the first position of a split; with `xp` NumPy, of a number."""
    position, first = 0, 0
    for number, (size, count) in enumerate(tiers, 1):
        before = xp.maximum(split - first, 0)
        position += size * (before if number == len(tiers) else xp.minimum(before, count))
        first += count
    return position


def split_size(split: Any, tiers: Tiers) -> Any:
    """Returns the number of positions of a split."""
    # An array from the start: Triton's lowering makes a truth value of a choice of two numbers.
    size, first = jnp.full_like(split, tiers[-1][0]), sum(count for _, count in tiers[:-1])
    for size_before, count in reversed(tiers[:-1]):
        size = jnp.where(split < first, size_before, size)
        first -= count
    return size


def piece_of(tiers: Tiers) -> int:
    """Returns the size of the pieces that a row's last split is cut into."""
    return tiers[0][0]
