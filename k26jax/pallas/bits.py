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


def paths(ancestors: jax.Array, n: int) -> jax.Array:
    """Returns each row's root path, int32 [..., n]: its set bits in ascending order, -1 past them.

    A parent stands before its children, so entry d is the row's ancestor at depth d and the last
    one is the row itself.

    Args:
      ancestors: uint32 words [..., w]; a row with more than n bits loses the highest.
    """
    n_words = ancestors.shape[-1]
    place = jnp.arange(32 * n_words, dtype=jnp.int32)
    below = (jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)) - jnp.uint32(1)
    inside = jax.lax.population_count(ancestors[..., None] & below).astype(jnp.int32)
    counts = jax.lax.population_count(ancestors).astype(jnp.int32)
    word = jnp.arange(n_words)
    before = jnp.where(word[:, None] > word, counts[..., None, :], 0).sum(axis=-1, dtype=jnp.int32)
    rank = (inside + before[..., None]).reshape(*ancestors.shape[:-1], -1)
    rank = jnp.where(unpack_bits(ancestors, len(place)), rank, -1)
    found = rank[..., None, :] == jnp.arange(n, dtype=jnp.int32)[:, None]
    return jnp.where(found, place + 1, 0).sum(axis=-1, dtype=jnp.int32) - 1
