"""Best-first trees as one Pallas program a tree, of one warp: a node costs a few reductions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32, Int32

from k26jax.pallas.gpu import Tile, launch
from k26jax.pallas.inside import barrier
from k26jax.pallas.tiles import tile as tile_of
from k26jax.pallas.tree_build import reference
from k26jax.pallas.tree_build.reference import Nodes
from k26jax.pallas.tree_build.search import Front, grow, start


@functools.partial(jax.jit, static_argnames=("budget", "tile"))
def build(
    log_probs: Float32[Array, "b l k"],
    token_ids: Int32[Array, "b l k"],
    root: Int32[Array, "b"],
    budget: int,
    *,
    tile: Tile | None = None,
) -> Nodes:
    """Returns the same as `reference.build`."""
    if 0 in log_probs.shape:
        return reference.build(log_probs, token_ids, root, budget)
    slots = log_probs.shape[0]

    def shape(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((slots, budget + 1, *more), dtype)

    row = shape(jnp.int32)
    return Nodes(
        *launch(
            _build,
            log_probs,
            token_ids,
            root,
            name="tree_build",
            grid=(slots,),
            out_shape=(row, row, row, shape(jnp.bool_), shape(jnp.uint32, budget // 32 + 1)),
            tile=tile or tile_of("tree_build"),
        )
    )


def _build(log_probs_ref: Any, token_ids_ref: Any, root_ref: Any, *refs: Any) -> None:
    nodes = Nodes(*refs)
    slot = pl.program_id(0)
    _, depths, width = log_probs_ref.shape
    _, rows, words = nodes.ancestors.shape
    word = jnp.arange(pl.next_power_of_2(words))

    def log_prob(depth: jax.Array, rank: jax.Array) -> jax.Array:
        inside = (depth < depths) & (rank < width)
        value = log_probs_ref[slot, jnp.minimum(depth, depths - 1), jnp.minimum(rank, width - 1)]
        return jnp.where(inside, value, -jnp.inf)

    def ancestors_at(row: jax.Array) -> Any:
        return nodes.ancestors.at[slot, row, pl.ds(0, word.shape[0])]

    def store(row: jax.Array, above: jax.Array, *fields: jax.Array) -> None:
        for ref, value in zip(nodes[:4], fields, strict=True):
            ref[slot, row] = value
        plt.store(ancestors_at(row), above | _own(row, word), mask=word < words)
        barrier()

    def add(row: jax.Array, front: Front) -> Front:
        front, found = grow(front, row, log_prob)
        # Without a candidate, its fields may be those of a node that is not there.
        depth, rank = jnp.minimum(found.depth, depths), jnp.minimum(found.rank, width - 1)
        above = plt.load(ancestors_at(found.parent), mask=word < words, other=0)
        store(
            row,
            jnp.where(found.exists, above, 0),
            jnp.where(found.exists, token_ids_ref[slot, depth - 1, rank], 0),
            jnp.where(found.exists, found.parent, -1),
            jnp.where(found.exists, depth, 0),
            found.exists,
        )
        return front

    zero = jnp.int32(0)
    none = jnp.zeros(word.shape, jnp.uint32)
    store(zero, none, root_ref[slot], zero - 1, zero, slot >= 0)
    lax.fori_loop(1, rows, add, start(pl.next_power_of_2(rows), log_prob))


def _own(row: jax.Array, word: jax.Array) -> jax.Array:
    """Returns the words of the set of one row."""
    bit = jnp.uint32(1) << (row & 31).astype(jnp.uint32)
    return jnp.where(word == row >> 5, bit, jnp.uint32(0))
