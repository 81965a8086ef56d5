"""Key blocks that hold tree rows, written out for a kernel that loads whole blocks.

For each tree row the blocks from the one that holds the length on: cached rows below the length,
then the row's root path, then zeros.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k26jax.pallas.gpu import Tile, launch
from k26jax.pallas.tree_mla.programs import Shape, depth_of, load_rows

_ROWS = 8


def staged(*operands: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each tree row's last position [b, t] and mixed blocks [b, t, key, c] and [.., r].

    Blocks past a row's last position hold anything.

    Args:
      operands: layer, table, lengths, route, cache_c_kv, cache_k_pe, tree_c_kv, tree_k_pe.
    """
    c_kv, k_pe = operands[-2:]
    keys = shape.n_mixed * shape.tile.columns
    lead = shape.batch, shape.tokens
    last, mixed_c_kv, mixed_k_pe = launch(
        functools.partial(stage, shape=shape),
        *operands,
        name="tree_mla_stage",
        grid=(keys // _ROWS * shape.tokens * shape.batch,),
        out_shape=[
            jax.ShapeDtypeStruct(lead, jnp.int32),
            *(jax.ShapeDtypeStruct((*lead, keys, x.shape[-1]), x.dtype) for x in (c_kv, k_pe)),
        ],
        tile=Tile(warps=8, stages=1),
    )
    return last, mixed_c_kv, mixed_k_pe


def stage(
    layer_ref: Any,
    table_ref: Any,
    lengths_ref: Any,
    route_ref: Any,
    cache_c_kv_ref: Any,
    cache_k_pe_ref: Any,
    tree_c_kv_ref: Any,
    tree_k_pe_ref: Any,
    last_ref: Any,
    mixed_c_kv_ref: Any,
    mixed_k_pe_ref: Any,
    *,
    shape: Shape,
) -> None:
    """One program: some positions of one tree row's mixed blocks."""
    block = shape.tile.columns
    pieces = shape.n_mixed * block // _ROWS
    piece, number = pl.program_id(0) % pieces, pl.program_id(0) // pieces
    token, sequence = number % shape.tokens, number // shape.tokens
    length = lengths_ref[sequence]
    last = length + depth_of(route_ref, sequence, token)
    first = length // block * block

    @pl.when(piece == 0)
    def _() -> None:
        last_ref[sequence, token] = last

    # Up to the end of the block that holds the last position.
    @pl.when(first + piece * _ROWS < (last // block + 1) * block)
    def _() -> None:
        held = piece * _ROWS + jnp.arange(_ROWS)
        position = first + held
        ahead, seen = position - length, position <= last
        node = plt.load(
            route_ref.at[sequence, token, jnp.maximum(ahead, 0)],
            mask=seen & (ahead >= 0),
            other=0,
        )
        slot, place = table_ref[sequence, 0], position
        if shape.is_paged:
            entry = jnp.minimum(first, jnp.maximum(length - 1, 0)) // shape.page
            slot, place = table_ref[sequence, entry], position - entry * shape.page
        for cache, tree, mixed in (
            (cache_c_kv_ref, tree_c_kv_ref, mixed_c_kv_ref),
            (cache_k_pe_ref, tree_k_pe_ref, mixed_k_pe_ref),
        ):
            rows = load_rows(cache, (layer_ref[0], slot, place), ahead < 0)
            rows = load_rows(tree, (sequence, node), seen & (ahead >= 0), rows)
            at = sequence, token, pl.ds(piece * _ROWS, _ROWS), pl.ds(0, mixed.shape[-1])
            plt.store(mixed.at[at], rows)
