"""What ranks tell each other, in words that mean nothing where there is one rank.

The model reads the same with and without a mesh: outside `shard_map`, or along an axis of one
rank, every function here returns its argument. All ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

# Minus infinity in float32.
_LOWEST_BITS = -(1 << 23)
# Ranks along each axis while programs are traced for the first of them alone.
_ALONE: ContextVar[Mapping[str, int] | None] = ContextVar("_ALONE", default=None)


@contextmanager
def first_rank_alone(sizes: Mapping[str, int]) -> Iterator[None]:
    """Within it programs are traced as the first rank of a mesh runs them, with no other there.

    For measurements on one device: a sum is this rank's part, and what other ranks would send is
    never the best. Outside `shard_map` only.

    Args:
      sizes: number of ranks along each mesh axis.
    """
    token = _ALONE.set(sizes)
    try:
        yield
    finally:
        _ALONE.reset(token)


def ranks(axis: str) -> int:
    """Returns the number of ranks along a mesh axis; 1 outside `shard_map`."""
    alone = _ALONE.get()
    if alone is not None:
        return alone[axis]
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def rank(axis: str) -> jax.Array | int:
    """Returns this rank's place along a mesh axis; 0 where there is one."""
    if ranks(axis) == 1:
        return 0
    if _ALONE.get() is not None:
        # Behind a barrier: a rank of a mesh does not know its place while it compiles either.
        return lax.optimization_barrier(jnp.int32(0))
    return lax.axis_index(axis)


def sum_over_ranks(x: jax.Array, *axes: str) -> jax.Array:
    """Returns the sum over the ranks along these axes in float32; x itself if there is one rank.

    The caller rounds the sum, once.
    """
    several = tuple(axis for axis in axes if ranks(axis) > 1)
    if not several:
        return x
    part = x.astype(jnp.float32)
    return part if _ALONE.get() is not None else lax.psum(part, several)


def counted_once(x: jax.Array, axis: str) -> jax.Array:
    """Returns x on the first rank of an axis and zeros on the others: a sum then has it once."""
    return jnp.where(jnp.equal(rank(axis), 0), x, 0) if ranks(axis) > 1 else x


def whole_rows(x: jax.Array, axis: str) -> jax.Array:
    """Returns rows [..., w] of which each rank has consecutive columns."""
    if ranks(axis) == 1:
        return x
    if _ALONE.get() is not None:
        return jnp.concatenate(list(_gathered(x, axis, -jnp.inf)), axis=-1)
    return lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


def own_columns(x: jax.Array, axis: str) -> jax.Array:
    """Returns the columns of whole rows [..., w] that belong to this rank."""
    count = ranks(axis)
    if count == 1:
        return x
    width = x.shape[-1] // count
    return lax.dynamic_slice_in_dim(x, rank(axis) * width, width, axis=x.ndim - 1)


def take_rows(table: jax.Array, ids: jax.Array, axis: str) -> jax.Array:
    """Returns the rows ids [...] of a table whose rows are shared out in order.

    Each row comes from one rank, so the sum is exact.
    """
    if ranks(axis) == 1:
        return table[ids]
    held = table.shape[0]
    local = ids - rank(axis) * held
    is_here = (local >= 0) & (local < held)
    rows = jnp.where(is_here[..., None], table[jnp.clip(local, 0, held - 1)], 0)
    return sum_over_ranks(rows, axis)


def best_over_ranks(
    ids: jax.Array, values: jax.Array, axis: str, held: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the best of every rank's best column [...], by global id, and its value.

    One pair a rank travels. Ties go to the lowest id, and the first NaN counts as the largest.

    Args:
      ids: among the `held` columns of this rank.
    """
    if ranks(axis) == 1:
        return ids, values
    every_id, every_value = _gather_pairs(ids + rank(axis) * held, values, axis)
    first = jnp.argmax(every_value, axis=0)[None]
    best_id = jnp.take_along_axis(every_id, first, axis=0)[0]
    return best_id, jnp.take_along_axis(every_value, first, axis=0)[0]


def top_over_ranks(
    ids: jax.Array, values: jax.Array, axis: str, held: int, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the best `count` of every rank's best columns [rows, k], best first.

    Ties go to the lowest id.

    Args:
      ids: among the `held` columns of this rank; on each rank best first, ties lowest first.
    """
    if ranks(axis) == 1:
        return ids, values
    every = _gather_pairs(ids + rank(axis) * held, values, axis)
    every_id, every_value = (jnp.concatenate(list(x), axis=-1) for x in every)
    top, place = lax.top_k(every_value, count)
    return jnp.take_along_axis(every_id, place, axis=-1), top


def log_total_over_ranks(log_total: jax.Array, axis: str) -> jax.Array:
    """Returns the logarithm of the sum of exp over all columns, of each rank's own."""
    if ranks(axis) == 1:
        return log_total
    return jax.nn.logsumexp(_gathered(log_total, axis, -jnp.inf), axis=0)


def _gather_pairs(ids: jax.Array, values: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Returns ids and float32 values of all ranks in their order, [rank, ...]; one message."""
    bits = lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    pairs = _gathered(jnp.stack([ids.astype(jnp.int32), bits]), axis, _LOWEST_BITS)
    return pairs[:, 0], lax.bitcast_convert_type(pairs[:, 1], jnp.float32)


def _gathered(x: jax.Array, axis: str, absent: float | int) -> jax.Array:
    """Returns every rank's x in their order, [rank, ...].

    Args:
      absent: what stands for ranks that are not there.
    """
    if _ALONE.get() is None:
        return lax.all_gather(x, axis)
    return jnp.full((ranks(axis), *x.shape), absent, x.dtype).at[0].set(x)
