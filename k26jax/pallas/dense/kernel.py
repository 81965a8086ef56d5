"""Products with float weights on a GPU: few rows, each weight streamed once per 16 of them.

A program takes one tile of 16 rows and one of columns and walks over the sum in wide steps, which
the compiler pipelines. Row tiles are the fastest axis of the grid, so programs that read the same
weights run together and share them in L2. Rows that do not exist are zero and cost no reads.

A step's products go to `splits` sums that do not wait for each other: a chain of matrix
instructions over the whole depth would take longer than the weights take to arrive.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from k26jax.pallas.gpu import Tile, launch, layer_operand
from k26jax.pallas.tiles import tile as tile_of

Load = Callable[[Any], tuple[jax.Array, list[jax.Array]]]
# Where the weights change from one shape of tile to the next; of weights alone, never of rows.
_SHORT_SUM = 2048
_WIDE = 8192


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


@functools.partial(jax.jit, static_argnames=("nope", "tile"))
def absorb(
    query: Float[Array, "t h qk"],
    kv_b: Float[Array, "l h nv c"],
    *,
    layer: int | Int32[Array, ""],
    nope: int,
    tile: Tile | None = None,
) -> Float[Array, "t h c"]:
    """Returns the latent queries; reads w_uk in its place in the stack.

    Reference: k26jax.pallas.dense.reference.absorb.
    """
    kernel = functools.partial(_absorb_kernel, nope=nope)
    return _by_head(kernel, query, kv_b, layer, kv_b.shape[3], query.dtype, "dense_absorb", tile)


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
    kernel = functools.partial(_values_kernel, nope=nope)
    width = kv_b.shape[2] - nope
    return _by_head(kernel, attended, kv_b, layer, width, kv_b.dtype, "dense_values", tile)


def dense_tile(n: int, k: int) -> Tile:
    """Returns the tile of a launch with n columns in all and sums of k elements."""
    if k <= _SHORT_SUM:
        return tile_of("dense_short")
    return tile_of("dense_wide" if n >= _WIDE else "dense_narrow")


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
    out_shape = tuple(
        jax.ShapeDtypeStruct((t, width), kind or x.dtype)
        for width, kind in zip(widths, kinds, strict=True)
    )
    return launch(
        kernel,
        layer_operand(layer),
        x,
        *(weight for part in parts for weight in part),
        name="dense" if all(len(part) == 1 for part in parts) else "dense_gated",
        grid=(pl.cdiv(t, tile.rows), sum(pl.cdiv(width, tile.columns) for width in widths)),
        out_shape=out_shape,
        tile=tile,
    )


def _by_head(
    kernel: Callable[..., None],
    x: jax.Array,
    kv_b: jax.Array,
    layer: int | jax.Array,
    width: int,
    kind: DTypeLike,
    name: str,
    tile: Tile | None,
) -> jax.Array:
    t, heads = x.shape[:2]
    tile = tile or tile_of(name)
    return launch(
        functools.partial(kernel, tile=tile),
        layer_operand(layer),
        x,
        kv_b,
        name=name,
        grid=(pl.cdiv(t, tile.rows), heads, pl.cdiv(width, tile.columns)),
        out_shape=jax.ShapeDtypeStruct((t, heads, width), kind),
        tile=tile,
    )


def _dense_kernel(layer_ref, x_ref, *refs, counts: tuple[int, ...], tile: Tile) -> None:
    weight_refs, out_refs = refs[: sum(counts)], refs[sum(counts) :]
    first_row, column_tile = pl.program_id(0) * tile.rows, pl.program_id(1)
    layer = layer_ref[0]
    first_tile = 0
    for count, out_ref in zip(counts, out_refs, strict=True):
        part, weight_refs = weight_refs[:count], weight_refs[count:]
        n_tiles = pl.cdiv(out_ref.shape[1], tile.columns)
        first_column = (column_tile - first_tile) * tile.columns
        write = functools.partial(
            _write_columns, x_ref, part, out_ref, layer, first_row, first_column, tile
        )
        if len(counts) == 1:
            write()
        else:
            pl.when((column_tile >= first_tile) & (column_tile < first_tile + n_tiles))(write)
        first_tile += n_tiles


def _write_columns(x_ref, weight_refs, out_ref, layer, first_row, first_column, tile) -> None:
    width, k = out_ref.shape[1], x_ref.shape[1]
    rows, columns = pl.ds(first_row, tile.rows), pl.ds(first_column, tile.columns)
    row_exists = _exists(first_row, tile.rows, x_ref.shape[0])
    column_exists = _exists(first_column, tile.columns, width)
    depth, splits = _steps(k, tile)
    x_dtype = x_ref.dtype

    def load(first):
        elements = pl.ds(first, depth)
        is_inside = _exists(first, depth, k) if k % (depth * splits) else None
        x = _load(x_ref.at[rows, elements], row_exists, is_inside)
        checked = column_exists if width % tile.columns else None
        weights = [
            _load(ref.at[layer, columns, elements], checked, is_inside).astype(x_dtype).T
            for ref in weight_refs
        ]
        return x, weights

    zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    sums = _accumulate(load, k, depth, splits, [zero] * len(weight_refs))
    if len(sums) == 2:
        gate, up = (part.astype(x_dtype).astype(jnp.float32) for part in sums)
        sums = [jax.nn.silu(gate) * up]
    is_kept = row_exists[:, None] & column_exists[None, :]
    plt.store(out_ref.at[rows, columns], sums[0].astype(out_ref.dtype), mask=is_kept)


def _absorb_kernel(layer_ref, query_ref, kv_b_ref, out_ref, *, nope: int, tile: Tile) -> None:
    first_row, head = pl.program_id(0) * tile.rows, pl.program_id(1)
    first_column = pl.program_id(2) * tile.columns
    rows, columns = pl.ds(first_row, tile.rows), pl.ds(first_column, tile.columns)
    row_exists = _exists(first_row, tile.rows, out_ref.shape[0])
    column_exists = _exists(first_column, tile.columns, out_ref.shape[2])
    depth, splits = _steps(nope, tile)
    layer = layer_ref[0]

    def load(first):
        elements = pl.ds(first, depth)
        is_inside = _exists(first, depth, nope)
        query = _load(query_ref.at[rows, head, elements], row_exists, is_inside)
        weight = _load(kv_b_ref.at[layer, head, elements, columns], is_inside, column_exists)
        return query, [weight.astype(query.dtype)]

    zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    (latent,) = _accumulate(load, nope, depth, splits, [zero])
    is_kept = row_exists[:, None] & column_exists[None, :]
    plt.store(out_ref.at[rows, head, columns], latent.astype(out_ref.dtype), mask=is_kept)


def _values_kernel(layer_ref, attended_ref, kv_b_ref, out_ref, *, nope: int, tile: Tile) -> None:
    first_row, head = pl.program_id(0) * tile.rows, pl.program_id(1)
    first_column = pl.program_id(2) * tile.columns
    rows, columns = pl.ds(first_row, tile.rows), pl.ds(first_column, tile.columns)
    row_exists = _exists(first_row, tile.rows, out_ref.shape[0])
    column_exists = _exists(first_column, tile.columns, out_ref.shape[2])
    latent = attended_ref.shape[2]
    depth, splits = _steps(latent, tile)
    layer = layer_ref[0]

    def load(first):
        elements = pl.ds(first, depth)
        is_inside = _exists(first, depth, latent)
        attended = _load(attended_ref.at[rows, head, elements], row_exists, is_inside)
        w_uv = kv_b_ref.at[layer, head, pl.ds(nope + first_column, tile.columns), elements]
        return attended.astype(kv_b_ref.dtype), [_load(w_uv, column_exists, is_inside).T]

    zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    (value,) = _accumulate(load, latent, depth, splits, [zero])
    is_kept = row_exists[:, None] & column_exists[None, :]
    plt.store(out_ref.at[rows, head, columns], value.astype(out_ref.dtype), mask=is_kept)


def _steps(k: int, tile: Tile) -> tuple[int, int]:
    """Returns the depth of a step and its number of sums, no more than a sum of k needs."""
    depth = max(16, min(tile.depth, pl.next_power_of_2(k)))
    return depth, min(tile.splits, pl.cdiv(k, depth))


def _accumulate(
    load: Load, k: int, depth: int, splits: int, zeros: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the products over the whole depth, one for each weight, in float32.

    Args:
      load: first element -> the rows [rows, depth] and each weight [depth, columns].
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
    sums = lax.fori_loop(0, n_steps, step, tuple(zeros) * splits)
    n = len(zeros)
    return [functools.reduce(jnp.add, sums[index::n]) for index in range(n)]


def _exists(first, size: int, count: int) -> jax.Array:
    return first + jnp.arange(size) < count


def _load(ref, row_exists: jax.Array | None, column_exists: jax.Array | None) -> jax.Array:
    """Returns a block of two axes, zero where either does not exist; None: all does."""
    mask = None
    if row_exists is not None:
        mask = jnp.broadcast_to(row_exists[:, None], ref.shape)
    if column_exists is not None:
        columns = jnp.broadcast_to(column_exists[None, :], ref.shape)
        mask = columns if mask is None else mask & columns
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0.0)
