"""What the models share besides the kernels: products of any shape and rotary angles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from k26jax.config import RopeConfig
from k26jax.pallas.dense import dense
from k26jax.pallas.norm.reference import normalize as rms_norm
from k26jax.pallas.norm.reference import rotate
from k26jax.pallas.products import contract
from k26jax.sharding.collectives import sum_over_ranks
from k26jax.sharding.rules import MODEL

__all__ = [
    "contract",
    "flat",
    "linear",
    "rms_norm",
    "rope_tables",
    "rotate",
    "summed_dense",
]


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x [..., i] times weight [o, i] transposed, [..., o] in x's dtype."""
    return contract("...i,oi->...o", x, weight.astype(x.dtype)).astype(x.dtype)


def summed_dense(
    x: jax.Array, weights: jax.Array, *, layer: int, inputs: int, kernels: str
) -> jax.Array:
    """Returns x [n, i] times a layer's weight transposed, [n, o] in x's dtype.

    Where a rank holds some of the inputs, its product is a part of a sum over ranks, which comes
    back in float32: who adds it to the residual rounds it there, and no kernel does that alone.

    Args:
      weights: the stack, [l, o, i].
      inputs: i of the whole weight.
    """
    if weights.shape[-1] == inputs:
        return dense(x, (weights,), layer=layer, kernels=kernels)[0]
    part = dense(x, (weights,), layer=layer, dtypes=(jnp.float32,), kernels=kernels)[0]
    return sum_over_ranks(part, MODEL)


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
