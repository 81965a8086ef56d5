"""What the models share besides the kernels: products of any shape and rotary angles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from k26jax.config import RopeConfig
from k26jax.pallas.norm.reference import normalize as rms_norm
from k26jax.pallas.norm.reference import rotate
from k26jax.pallas.products import contract

__all__ = ["contract", "flat", "linear", "rms_norm", "rope_tables", "rotate"]


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x [..., i] times weight [o, i] transposed, [..., o] in x's dtype."""
    return contract("...i,oi->...o", x, weight.astype(x.dtype)).astype(x.dtype)


def flat(x: jax.Array) -> jax.Array:
    """Returns x [..., d] as rows [n, d], the form the kernels take."""
    return x.reshape(-1, x.shape[-1])


def rope_tables(positions: jax.Array, rope: RopeConfig, dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, float32 [..., dim / 2], YaRN's amplitude included.

    Angles are computed from the positions, so there is no table to run out of.
    """
    inv_freq = jnp.asarray(rope.inv_freq(dim))
    angles = positions.astype(jnp.float32)[..., None] * inv_freq
    amplitude = np.float32(rope.amplitude)
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude
