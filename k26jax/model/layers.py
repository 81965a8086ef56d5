"""The small pieces: linear, RMS norm, rotary embedding, SwiGLU. Sums run in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k26jax.config import RopeConfig
from k26jax.pallas.products import contract


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x [..., i] times weight [o, i] transposed, [..., o] in x's dtype."""
    return contract("...i,oi->...o", x, weight.astype(x.dtype)).astype(x.dtype)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Returns x over its root mean square, rounded to x's dtype, then times the gain."""
    x_f32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
    return (x_f32 * lax.rsqrt(mean_square + eps)).astype(x.dtype) * gain.astype(x.dtype)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up, computed in float32, in gate's dtype."""
    gate_f32 = gate.astype(jnp.float32)
    return (jax.nn.silu(gate_f32) * up.astype(jnp.float32)).astype(gate.dtype)


def rope_tables(positions: jax.Array, rope: RopeConfig, dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, float32 [..., dim / 2], YaRN's amplitude included.

    Angles are computed from the positions, so there is no table to run out of.
    """
    inv_freq = jnp.asarray(rope.inv_freq(dim))
    angles = positions.astype(jnp.float32)[..., None] * inv_freq
    amplitude = np.float32(rope.amplitude)
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Returns x [..., dim] rotated; the first components of all pairs come first.

    Args:
      cos, sin: [..., dim / 2], broadcastable against x's leading axes.
      interleaved: whether pairs are adjacent in x (MLA checkpoints) or half a head apart.
    """
    x_f32 = x.astype(jnp.float32)
    if interleaved:
        first, second = x_f32[..., 0::2], x_f32[..., 1::2]
    else:
        first, second = jnp.split(x_f32, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
