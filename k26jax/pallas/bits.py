"""Sets of tree rows as bits in uint32 words: bit j of word w stands for row 32 w + j."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pack_bits(flags: jax.Array) -> jax.Array:
    """Returns uint32 words [..., ceil(n / 32)] of booleans [..., n]."""
    n = flags.shape[-1]
    padded = jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, -n % 32)])
    bits = padded.reshape(*flags.shape[:-1], -1, 32).astype(jnp.uint32)
    return (bits << jnp.arange(32, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)


def unpack_bits(words: jax.Array, n: int) -> jax.Array:
    """Returns the first n bits of uint32 words [..., w] as booleans [..., n]."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :n].astype(bool)
