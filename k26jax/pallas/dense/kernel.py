"""Products with float weights on a GPU: few rows, each weight streamed once per 16 of them.

A program takes one tile of 16 rows and one of columns and walks over the sum in wide steps, which
the compiler pipelines. Row tiles are the fastest axis of the grid, so programs that read the same
weights run together and share them in L2. Rows that do not exist are zero and cost no reads.

A step's products go to `splits` sums that do not wait for each other: a chain of matrix
instructions over the whole depth would take longer than the weights take to arrive.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.dense.heads import absorb as absorb
from k26jax.pallas.dense.heads import values as values
from k26jax.pallas.dense.sums import accumulate, exists_mask, load_block, steps_of
from k26jax.pallas.gpu import Tile, launch, layer_operand
from k26jax.pallas.tiles import tile as tile_of

# Where the weights change from one shape of tile to the next; of weights alone, never of rows.
_SHORT_SUM = 2048
_WIDE = 6144
# About two for every multiprocessor.
_PROGRAMS = 256


@functools.partial(jax.jit, static_argnames=("dtypes", "tile"))
def dense(
    x: Float[Array, "t k"],
    weights: tuple[Float[Array, "l _ k"], ...],
    *,
    layer: int | Int32[Array, ""],
    dtypes: tuple[DTypeLike | None, ...] | None = None,
    tile: Tile | None = None,
) -> tuple[Float[Array, "t _"], ...]:
    """Returns x times each weight transposed, all in one launch.

    Cost: the weights are read ceil(t / 16) times, all but once from L2; no temporary memory.
    Reference: k26jax.pallas.dense.reference.dense.
    """
    kinds = dtypes or (None,) * len(weights)
    return _products(x, [(weight,) for weight in weights], kinds, layer, tile)


@functools.partial(jax.jit, static_argnames=("tile",))
def partial_sums(
    x: Float[Array, "t k"],
    weights: tuple[Float[Array, "l _ k"], ...],
    *,
    layer: int | Int32[Array, ""],
    tile: Tile | None = None,
) -> tuple[Float32[Array, "part t _"], ...]:
    """Returns x times each weight transposed, in parts; for weights of few columns.

    Several programs share a sum, so that all cores of a GPU read weights.

    Reference: k26jax.pallas.dense.reference.partial_sums.
    """
    tile = tile or parts_tile(sum(weight.shape[1] for weight in weights), x.shape[1])
    kinds = (jnp.float32,) * len(weights)
    return _products(x, [(weight,) for weight in weights], kinds, layer, tile)


@functools.partial(jax.jit, static_argnames=("dtypes", "tile"))
def gated(
    x: Float[Array, "t k"],
    gate: Float[Array, "l f k"],
    up: Float[Array, "l f k"],
    *,
    layer: int | Int32[Array, ""],
    others: tuple[Float[Array, "l _ k"], ...] = (),
    dtypes: tuple[DTypeLike | None, ...] | None = None,
    tile: Tile | None = None,
) -> tuple[Float[Array, "t _"], ...]:
    """Returns silu(x gate) * (x up) and then x times each of `others`, all in one launch.

    A program holds the same columns of gate and up.

    Reference: k26jax.pallas.dense.reference.gated.
    """
    parts = [(gate, up), *((other,) for other in others)]
    kinds = (None, *(dtypes or (None,) * len(others)))
    return _products(x, parts, kinds, layer, tile)


def dense_tile(n: int, k: int) -> Tile:
    """Returns the tile of a launch with n columns in all and sums of k elements."""
    if n >= _WIDE:
        return tile_of("dense_wide_short" if k <= _SHORT_SUM else "dense_wide")
    return tile_of("dense_short" if k <= _SHORT_SUM else "dense_narrow")


def parts_tile(n: int, k: int) -> Tile:
    """Returns the tile of a launch of partial sums, with as many parts as keep a GPU busy."""
    tile = tile_of("dense_parts")
    depth, splits = steps_of(k, tile)
    wanted = round(_PROGRAMS / pl.cdiv(n, tile.columns))
    return replace(tile, parts=max(1, min(wanted, pl.cdiv(k, depth * splits))))


def _products(
    x: jax.Array,
    parts: Sequence[tuple[jax.Array, ...]],
    kinds: Sequence[DTypeLike | None],
    layer: int | jax.Array,
    tile: Tile | None,
) -> tuple[jax.Array, ...]:
    (t, k), widths = x.shape, [part[0].shape[1] for part in parts]
    tile = tile or dense_tile(sum(weight.shape[1] for part in parts for weight in part), k)
    kernel = functools.partial(_dense_kernel, counts=tuple(map(len, parts)), tile=tile)
    lead = (tile.parts,) if tile.parts else ()
    out_shape = tuple(
        jax.ShapeDtypeStruct((*lead, t, width), kind or x.dtype)
        for width, kind in zip(widths, kinds, strict=True)
    )
    return launch(
        kernel,
        layer_operand(layer),
        x,
        *(weight for part in parts for weight in part),
        name="dense" if all(len(part) == 1 for part in parts) else "dense_gated",
        grid=(
            pl.cdiv(t, tile.rows),
            sum(pl.cdiv(width, tile.columns) for width in widths),
            max(tile.parts, 1),
        ),
        out_shape=out_shape,
        tile=tile,
    )


def _dense_kernel(layer_ref, x_ref, *refs, counts: tuple[int, ...], tile: Tile) -> None:
    weight_refs, out_refs = refs[: sum(counts)], refs[sum(counts) :]
    first_row, column_tile = pl.program_id(0) * tile.rows, pl.program_id(1)
    # Here and not where it is used: interpreted branches know no program.
    part = pl.program_id(2) if tile.parts else 0
    layer = layer_ref[0]
    first_tile = 0
    for count, out_ref in zip(counts, out_refs, strict=True):
        own_refs, weight_refs = weight_refs[:count], weight_refs[count:]
        n_tiles = pl.cdiv(out_ref.shape[-1], tile.columns)
        first_column = (column_tile - first_tile) * tile.columns
        write = functools.partial(
            _write_columns, x_ref, own_refs, out_ref, layer, first_row, first_column, part, tile
        )
        if len(counts) == 1:
            write()
        else:
            pl.when((column_tile >= first_tile) & (column_tile < first_tile + n_tiles))(write)
        first_tile += n_tiles


def _write_columns(
    x_ref, weight_refs, out_ref, layer, first_row, first_column, part, tile: Tile
) -> None:
    width, k = out_ref.shape[-1], x_ref.shape[1]
    rows, columns = pl.ds(first_row, tile.rows), pl.ds(first_column, tile.columns)
    row_exists = exists_mask(first_row, tile.rows, x_ref.shape[0])
    column_exists = exists_mask(first_column, tile.columns, width)
    depth, splits = steps_of(k, tile)
    x_dtype = x_ref.dtype

    def load(first):
        elements = pl.ds(first, depth)
        is_inside = exists_mask(first, depth, k) if k % (depth * splits) else None
        x = load_block(x_ref.at[rows, elements], row_exists, is_inside)
        checked = column_exists if width % tile.columns else None
        weights = [
            load_block(ref.at[layer, columns, elements], checked, is_inside).astype(x_dtype).T
            for ref in weight_refs
        ]
        return x, weights

    zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    parts = max(tile.parts, 1)
    sums = accumulate(load, k, depth, splits, [zero] * len(weight_refs), part, parts)
    if len(sums) == 2:
        gate, up = (part.astype(x_dtype).astype(jnp.float32) for part in sums)
        sums = [jax.nn.silu(gate) * up]
    is_kept = row_exists[:, None] & column_exists[None, :]
    at = (part, rows, columns) if tile.parts else (rows, columns)
    plt.store(out_ref.at[at], sums[0].astype(out_ref.dtype), mask=is_kept)
