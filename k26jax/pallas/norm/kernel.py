"""Norms, rotary embeddings and cache writes on a GPU: one program for each token.

A row is one program's, whole, so its sums are the same however many rows there are. Widths that
are no power of two are padded to one inside the program; padded elements are zero.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.gpu import Tile, launch, layer_operand
from k26jax.pallas.tiles import tile as tile_of


@functools.partial(jax.jit, static_argnames=("eps", "tile"))
def rms_norm(
    x: Float[Array, "t d"],
    gains: Float[Array, "l d"],
    *,
    layer: int | Int32[Array, ""],
    eps: float,
    residual: Float[Array, "t d"] | None = None,
    tile: Tile | None = None,
) -> Float[Array, "t d"] | tuple[Float[Array, "t d"], Float[Array, "t d"]]:
    """Returns x normed; with a residual their sum in x's dtype, and the sum normed.

    Reference: k26jax.pallas.norm.reference.rms_norm.
    """
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    added = () if residual is None else (residual,)
    outputs = launch(
        functools.partial(_rms_norm_kernel, eps=eps),
        layer_operand(layer),
        gains,
        x,
        *added,
        name="norm",
        grid=(x.shape[0],),
        out_shape=(row,) * (1 + len(added)),
        tile=tile or tile_of("norm"),
    )
    return outputs if added else outputs[0]


@functools.partial(jax.jit, static_argnames=("eps", "interleaved", "tile"))
def latent(
    compressed: Float[Array, "part t c_r"],
    gains: Float[Array, "l c"],
    cos: Float32[Array, "t r_half"],
    sin: Float32[Array, "t r_half"],
    *,
    layer: int | Int32[Array, ""],
    eps: float,
    interleaved: bool,
    query: Float[Array, "part t q"] | None = None,
    query_gains: Float[Array, "l q"] | None = None,
    tile: Tile | None = None,
) -> tuple[jax.Array, ...]:
    """Returns c_kv, k_pe and, if given, the normed query latent, all in one launch.

    Reference: k26jax.pallas.norm.reference.latent.
    """
    t, kind = compressed.shape[1], gains.dtype
    query_of = () if query is None or query_gains is None else (query_gains, query)
    widths = (gains.shape[1], 2 * cos.shape[1], *(part.shape[2] for part in query_of[1:]))
    return launch(
        functools.partial(_latent_kernel, eps=eps, interleaved=interleaved),
        layer_operand(layer),
        gains,
        compressed,
        cos,
        sin,
        *query_of,
        name="norm_latent",
        grid=(t,),
        out_shape=tuple(jax.ShapeDtypeStruct((t, width), kind) for width in widths),
        tile=tile or tile_of("norm_latent"),
    )


@functools.partial(jax.jit, static_argnames=("eps", "tile"))
def head_norm(
    x: Float[Array, "t h width"],
    gains: Float[Array, "l width"],
    cos: Float32[Array, "t half"],
    sin: Float32[Array, "t half"],
    *,
    layer: int | Int32[Array, ""],
    eps: float,
    tile: Tile | None = None,
) -> Float[Array, "t h width"]:
    """Returns each head normed and then rotated, pairs half a head apart.

    Reference: k26jax.pallas.norm.reference.head_norm.
    """
    t, heads = x.shape[:2]
    tile = tile or tile_of("norm_heads")
    return launch(
        functools.partial(_head_norm_kernel, eps=eps, tile=tile),
        layer_operand(layer),
        gains,
        x,
        cos,
        sin,
        name="norm_head",
        grid=(t, pl.cdiv(heads, tile.columns)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        tile=tile,
    )


@functools.partial(jax.jit, static_argnames=("tile",))
def append(
    caches: tuple[Float[Array, "l slot s ..."], ...],
    rows: tuple[Float[Array, "l b t ..."], ...],
    slots: Int32[Array, "b"],
    start: Int32[Array, "b"],
    count: Int32[Array, "b"],
    *,
    tile: Tile | None = None,
) -> tuple[Float[Array, "l slot s ..."], ...]:
    """Returns the caches with the rows written in place, all layers and caches in one launch.

    Donates: caches, where the caller is jitted with them donated; else they are copied first.
    Reference: k26jax.pallas.norm.reference.append.
    """
    flat = [cache.reshape(*cache.shape[:3], -1) for cache in caches]
    new = [part.reshape(*part.shape[:3], -1) for part in rows]
    layers, b, t = new[0].shape[:3]
    operands = (slots, start, count, *new, *flat)
    first = len(operands) - len(flat)
    written = launch(
        functools.partial(_append_kernel, n=len(flat)),
        *operands,
        name="norm_append",
        grid=(t, b, layers),
        out_shape=tuple(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in flat),
        tile=tile or tile_of("norm_append"),
        aliases={first + index: index for index in range(len(flat))},
    )
    return tuple(part.reshape(cache.shape) for part, cache in zip(written, caches, strict=True))


def _rms_norm_kernel(layer_ref, gain_ref, x_ref, *refs, eps: float) -> None:
    *sum_refs, out_ref = refs
    row, width = pl.program_id(0), x_ref.shape[1]
    x = _read(x_ref, (row,), 0, width)
    if sum_refs:
        residual_ref, sum_ref = sum_refs
        residual = _read(residual_ref, (row,), 0, width)
        x = (x.astype(jnp.float32) + residual.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)
        _write(sum_ref, (row,), 0, width, x)
    gain = _read(gain_ref, (layer_ref[0],), 0, width)
    _write(out_ref, (row,), 0, width, _normalize(x, gain, width, eps))


def _latent_kernel(
    layer_ref, gain_ref, compressed_ref, cos_ref, sin_ref, *refs, eps: float, interleaved: bool
) -> None:
    row, layer = pl.program_id(0), layer_ref[0]
    *query_refs, c_kv_ref, k_pe_ref = refs if len(refs) == 2 else (*refs[:2], refs[4], *refs[2:4])
    width, half = gain_ref.shape[1], cos_ref.shape[1]
    kind = gain_ref.dtype
    c_kv = _read_total(compressed_ref, row, 0, width).astype(kind)
    gain = _read(gain_ref, (layer,), 0, width)
    apart, step = (1, 2) if interleaved else (half, 1)
    first, second = (
        _read_total(compressed_ref, row, width + offset, half, step)
        .astype(kind)
        .astype(jnp.float32)
        for offset in (0, apart)
    )
    cos, sin = (_read(ref, (row,), 0, half) for ref in (cos_ref, sin_ref))
    if query_refs:
        query_gain_ref, query_ref, query_out_ref = query_refs
        rank = query_ref.shape[2]
        query = _read_total(query_ref, row, 0, rank).astype(query_gain_ref.dtype)
        query_gain = _read(query_gain_ref, (layer,), 0, rank)
        _write(query_out_ref, (row,), 0, rank, _normalize(query, query_gain, rank, eps))
    _write(c_kv_ref, (row,), 0, width, _normalize(c_kv, gain, width, eps))
    _write_rotated(k_pe_ref, (row,), first, second, cos, sin)


def _head_norm_kernel(
    layer_ref, gain_ref, x_ref, cos_ref, sin_ref, out_ref, *, eps: float, tile: Tile
) -> None:
    width, half = x_ref.shape[2], x_ref.shape[2] // 2
    row, layer = pl.program_id(0), layer_ref[0]
    at = (row, _heads(tile))
    halves = [_read(x_ref, at, start, half) for start in (0, half)]
    gains = [_read(gain_ref, (layer,), start, half)[None, :] for start in (0, half)]
    cos, sin = (_read(ref, (row,), 0, half)[None, :] for ref in (cos_ref, sin_ref))
    squares = [jnp.square(part.astype(jnp.float32)).sum(axis=1) for part in halves]
    scale = lax.rsqrt((squares[0] + squares[1]) / width + eps)[:, None]
    first, second = (
        _scaled(part, scale, gain).astype(jnp.float32)
        for part, gain in zip(halves, gains, strict=True)
    )
    _write_rotated(out_ref, at, first, second, cos, sin)


def _append_kernel(slots_ref, start_ref, count_ref, *refs, n: int) -> None:
    row, b, layer = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    new_refs, out_refs = refs[:n], refs[2 * n :]
    slot, position = slots_ref[b], start_ref[b] + row

    @pl.when((row < count_ref[b]) & (position < out_refs[0].shape[2]))
    def _():
        for new_ref, out_ref in zip(new_refs, out_refs, strict=True):
            width = new_ref.shape[3]
            new = _read(new_ref, (layer, b, row), 0, width)
            _write(out_ref, (layer, slot, position), 0, width, new.astype(out_ref.dtype))


def _heads(tile: Tile) -> jax.Array:
    return (pl.program_id(1) * tile.columns + jnp.arange(tile.columns))[:, None]


def _normalize(x: jax.Array, gain: jax.Array, width: int, eps: float) -> jax.Array:
    mean_square = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1) / width
    return _scaled(x, lax.rsqrt(mean_square + eps), gain)


def _scaled(x: jax.Array, scale: jax.Array, gain: jax.Array) -> jax.Array:
    normed = (x.astype(jnp.float32) * scale).astype(x.dtype)
    # The product of two values of a type, computed in float32, is rounded once.
    product = normed.astype(jnp.float32) * gain.astype(x.dtype).astype(jnp.float32)
    return product.astype(x.dtype)


def _elements(ref, at: tuple, start: int, width: int, step: int = 1) -> tuple[tuple, jax.Array]:
    """Returns indices of `width` elements, padded to a power of two, and which of them exist.

    Args:
      at: leading indices; the last may be an array of heads [h, 1].
      step: distance of the elements.
    """
    columns = jnp.arange(pl.next_power_of_2(width))
    exists = columns < width
    place = start + step * columns
    if at and getattr(at[-1], "ndim", 0) == 2:
        heads = at[-1]
        exists = exists[None, :] & (heads < ref.shape[len(at) - 1])
        heads, place = (jnp.broadcast_to(part, exists.shape) for part in (heads, place[None, :]))
        return (*at[:-1], heads, place), exists
    return (*at, place), exists


def _read(ref, at: tuple, start: int, width: int, step: int = 1) -> jax.Array:
    indices, exists = _elements(ref, at, start, width, step)
    return plt.load(ref.at[indices], mask=exists, other=0.0)


def _write(ref, at: tuple, start: int, width: int, value: jax.Array) -> None:
    indices, exists = _elements(ref, at, start, width)
    plt.store(ref.at[indices], value, mask=exists)


def _read_total(ref, row: jax.Array, start: int, width: int, step: int = 1) -> jax.Array:
    """Returns elements of a row [part, row, element], their parts added in order, in float32."""
    parts = (
        _read(ref, (jnp.int32(part), row), start, width, step).astype(jnp.float32)
        for part in range(ref.shape[0])
    )
    return functools.reduce(jnp.add, parts)


def _write_rotated(ref, at: tuple, first, second, cos, sin) -> None:
    half = ref.shape[-1] // 2
    _write(ref, at, 0, half, (first * cos - second * sin).astype(ref.dtype))
    _write(ref, at, half, half, (second * cos + first * sin).astype(ref.dtype))
