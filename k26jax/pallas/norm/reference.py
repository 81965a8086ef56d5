"""Norms, rotary embeddings and cache writes in plain JAX: the meaning of the kernels.

Norms and rotations run in float32; results are rounded where the model rounds.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.products import total


def normalize(x: Float[Array, "*rows d"], gain: Float[Array, "d"], eps: float) -> jax.Array:
    """Returns x over its root mean square, rounded to x's dtype, then times the gain."""
    x_f32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
    return (x_f32 * lax.rsqrt(mean_square + eps)).astype(x.dtype) * gain.astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Returns x [..., r] rotated; the first components of all pairs come first.

    Args:
      cos, sin: [..., r / 2], broadcastable against x's leading axes.
      interleaved: whether pairs are adjacent in x or half of it apart.
    """
    x_f32 = x.astype(jnp.float32)
    if interleaved:
        first, second = x_f32[..., 0::2], x_f32[..., 1::2]
    else:
        first, second = jnp.split(x_f32, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rms_norm(
    x: Float[Array, "t d"],
    gains: Float[Array, "l d"],
    *,
    layer: int | Int32[Array, ""],
    eps: float,
    residual: Float[Array, "t d"] | None = None,
) -> Float[Array, "t d"] | tuple[Float[Array, "t d"], Float[Array, "t d"]]:
    """Returns x normed; with a residual their sum in x's dtype, and the sum normed.

    Args:
      gains: stack over layers.
      layer: index into the stack.
      residual: rounded to x's dtype before the sum.
    """
    if residual is None:
        return normalize(x, gains[layer], eps)
    total = x + residual.astype(x.dtype)
    return total, normalize(total, gains[layer], eps)


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
) -> tuple[jax.Array, ...]:
    """Returns c_kv [t, c] after its norm, k_pe [t, r] rotated and, if given, the query normed.

    All in the gains' dtype. Formulas 1 to 4 of MLA (DeepSeek-V2, section 2.1).

    Args:
      compressed: the latent and, behind it, the shared rotary key; in parts, whose sum is
        rounded to the gains' dtype.
      gains: stack of the latent norm's gains.
      interleaved: as in `rotate`.
      query: latent of the queries, in parts too, with the stack of its norm's gains.
    """
    compressed = total(compressed).astype(gains.dtype)
    c_kv, k_pe = jnp.split(compressed, [gains.shape[-1]], axis=-1)
    c_kv = normalize(c_kv, gains[layer], eps)
    rows = (c_kv, rotate(k_pe, cos, sin, interleaved=interleaved))
    if query is None or query_gains is None:
        return rows
    query = total(query).astype(query_gains.dtype)
    return (*rows, normalize(query, query_gains[layer], eps))


def rotate_heads(
    query: Float[Array, "t h qk"],
    cos: Float32[Array, "t r_half"],
    sin: Float32[Array, "t r_half"],
    *,
    interleaved: bool,
) -> Float[Array, "t h r"]:
    """Returns q_pe: the last r components of each head, rotated."""
    q_pe = query[..., query.shape[-1] - 2 * cos.shape[-1] :]
    return rotate(q_pe, cos[:, None], sin[:, None], interleaved=interleaved)


def head_norm(
    x: Float[Array, "t h width"],
    gains: Float[Array, "l width"],
    cos: Float32[Array, "t half"],
    sin: Float32[Array, "t half"],
    *,
    layer: int | Int32[Array, ""],
    eps: float,
) -> Float[Array, "t h width"]:
    """Returns each head normed and then rotated, pairs half a head apart."""
    normed = normalize(x, gains[layer], eps)
    return rotate(normed, cos[:, None], sin[:, None], interleaved=False)


def append(
    caches: tuple[Float[Array, "l slot s ..."], ...],
    rows: tuple[Float[Array, "l b t ..."], ...],
    slots: Int32[Array, "b"],
    start: Int32[Array, "b"],
    count: Int32[Array, "b"],
) -> tuple[Float[Array, "l slot s ..."], ...]:
    """Returns the caches with count[b] rows at start[b] onward in slot slots[b] of all layers.

    Rows past the count or past the capacity are dropped, so nothing else is touched.

    Args:
      caches: of one number of layers, slots and rows, of any width.
      rows: for each cache; rounded to its dtype.
    """
    capacity = caches[0].shape[2]
    offset = jnp.arange(rows[0].shape[2])
    position = jnp.where(offset < count[:, None], start[:, None] + offset, capacity)
    return tuple(
        cache.at[:, slots[:, None], position].set(new.astype(cache.dtype), mode="drop")
        for cache, new in zip(caches, rows, strict=True)
    )
