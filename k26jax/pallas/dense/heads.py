"""Products of each head with its own part of kv_b, in its place in the stack."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.dense.sums import accumulate, exists_mask, load_block, steps_of
from k26jax.pallas.gpu import Tile, launch, layer_operand
from k26jax.pallas.tiles import tile as tile_of


@functools.partial(jax.jit, static_argnames=("nope", "interleaved", "tile"))
def absorb(
    query: Float[Array, "t h qk"],
    kv_b: Float[Array, "l h nv c"],
    cos: Float32[Array, "t r_half"],
    sin: Float32[Array, "t r_half"],
    *,
    layer: int | Int32[Array, ""],
    nope: int,
    interleaved: bool,
    tile: Tile | None = None,
) -> tuple[Float[Array, "t h c"], Float[Array, "t h r"]]:
    """Returns q_latent and q_pe; reads w_uk in its place in the stack.

    The last program of each tile of rows and head rotates, the others multiply.

    Reference: k26jax.pallas.dense.reference.absorb.
    """
    (t, heads), latent = query.shape[:2], kv_b.shape[3]
    tile = tile or tile_of("dense_absorb")
    return launch(
        functools.partial(_absorb_kernel, nope=nope, interleaved=interleaved, tile=tile),
        layer_operand(layer),
        query,
        kv_b,
        cos,
        sin,
        name="dense_absorb",
        grid=(pl.cdiv(t, tile.rows), heads, pl.cdiv(latent, tile.columns) + 1),
        out_shape=tuple(
            jax.ShapeDtypeStruct((t, heads, width), query.dtype)
            for width in (latent, 2 * cos.shape[1])
        ),
        tile=tile,
    )


@functools.partial(jax.jit, static_argnames=("nope", "tile"))
def values(
    attended: Float[Array, "t h c"],
    kv_b: Float[Array, "l h nv c"],
    *,
    layer: int | Int32[Array, ""],
    nope: int,
    tile: Tile | None = None,
) -> Float[Array, "t h v"]:
    """Returns each head's values; reads w_uv in its place in the stack.

    Reference: k26jax.pallas.dense.reference.values.
    """
    (t, heads), width = attended.shape[:2], kv_b.shape[2] - nope
    tile = tile or tile_of("dense_values")
    return launch(
        functools.partial(_values_kernel, nope=nope, tile=tile),
        layer_operand(layer),
        attended,
        kv_b,
        name="dense_values",
        grid=(pl.cdiv(t, tile.rows), heads, pl.cdiv(width, tile.columns)),
        out_shape=jax.ShapeDtypeStruct((t, heads, width), kv_b.dtype),
        tile=tile,
    )


def _absorb_kernel(
    layer_ref,
    query_ref,
    kv_b_ref,
    cos_ref,
    sin_ref,
    out_ref,
    q_pe_ref,
    *,
    nope: int,
    interleaved: bool,
    tile: Tile,
) -> None:
    first_row, head = pl.program_id(0) * tile.rows, pl.program_id(1)
    column_tile = pl.program_id(2)
    is_last = column_tile == pl.cdiv(out_ref.shape[2], tile.columns)

    @pl.when(is_last)
    def _():
        _rotate(query_ref, cos_ref, sin_ref, q_pe_ref, first_row, head, tile.rows, interleaved)

    @pl.when(jnp.logical_not(is_last))
    def _():
        _absorb_columns(
            layer_ref, query_ref, kv_b_ref, out_ref, first_row, head, column_tile, nope, tile
        )


def _rotate(
    query_ref, cos_ref, sin_ref, out_ref, first_row, head, n_rows: int, interleaved: bool
) -> None:
    """Writes the last components of one head of a tile of rows, rotated."""
    half = cos_ref.shape[1]
    row = (first_row + jnp.arange(n_rows))[:, None]
    lane = jnp.arange(pl.next_power_of_2(half))[None, :]
    exists = (row < query_ref.shape[0]) & (lane < half)
    row, lane = jnp.broadcast_to(row, exists.shape), jnp.broadcast_to(lane, exists.shape)
    apart, step = (1, 2) if interleaved else (half, 1)
    start = query_ref.shape[2] - 2 * half + step * lane

    def load(ref, *at) -> jax.Array:
        return plt.load(ref.at[at], mask=exists, other=0.0).astype(jnp.float32)

    first, second = (load(query_ref, row, head, start + offset) for offset in (0, apart))
    cos, sin = load(cos_ref, row, lane), load(sin_ref, row, lane)
    for offset, part in ((0, first * cos - second * sin), (half, second * cos + first * sin)):
        part = part.astype(out_ref.dtype)
        plt.store(out_ref.at[row, head, lane + offset], part, mask=exists)


def _absorb_columns(
    layer_ref, query_ref, kv_b_ref, out_ref, first_row, head, column_tile, nope, tile
) -> None:
    first_column = column_tile * tile.columns
    rows, columns = pl.ds(first_row, tile.rows), pl.ds(first_column, tile.columns)
    row_exists = exists_mask(first_row, tile.rows, out_ref.shape[0])
    column_exists = exists_mask(first_column, tile.columns, out_ref.shape[2])
    depth, splits = steps_of(nope, tile)
    layer = layer_ref[0]

    def load(first):
        elements = pl.ds(first, depth)
        is_inside = exists_mask(first, depth, nope)
        query = load_block(query_ref.at[rows, head, elements], row_exists, is_inside)
        weight = load_block(kv_b_ref.at[layer, head, elements, columns], is_inside, column_exists)
        return query, [weight.astype(query.dtype)]

    zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    (latent,) = accumulate(load, nope, depth, splits, [zero])
    is_kept = row_exists[:, None] & column_exists[None, :]
    plt.store(out_ref.at[rows, head, columns], latent.astype(out_ref.dtype), mask=is_kept)


def _values_kernel(layer_ref, attended_ref, kv_b_ref, out_ref, *, nope: int, tile: Tile) -> None:
    first_row, head = pl.program_id(0) * tile.rows, pl.program_id(1)
    first_column = pl.program_id(2) * tile.columns
    rows, columns = pl.ds(first_row, tile.rows), pl.ds(first_column, tile.columns)
    row_exists = exists_mask(first_row, tile.rows, out_ref.shape[0])
    column_exists = exists_mask(first_column, tile.columns, out_ref.shape[2])
    latent = attended_ref.shape[2]
    depth, splits = steps_of(latent, tile)
    layer = layer_ref[0]

    def load(first):
        elements = pl.ds(first, depth)
        is_inside = exists_mask(first, depth, latent)
        attended = load_block(attended_ref.at[rows, head, elements], row_exists, is_inside)
        w_uv = kv_b_ref.at[layer, head, pl.ds(nope + first_column, tile.columns), elements]
        return attended.astype(kv_b_ref.dtype), [load_block(w_uv, column_exists, is_inside).T]

    zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    (value,) = accumulate(load, latent, depth, splits, [zero])
    is_kept = row_exists[:, None] & column_exists[None, :]
    plt.store(out_ref.at[rows, head, columns], value.astype(out_ref.dtype), mask=is_kept)
