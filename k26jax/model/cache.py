"""The latent cache of the target and the key-value cache of the drafter, in fixed slots."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from k26jax.config import DraftConfig, ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """What MLA keeps of each token; rows at or past a slot's length are out of use.

    c_kv: [l, slot, s, c], the latent after its norm.
    k_pe: [l, slot, s, r], the shared rotary key after rotation.
    """

    c_kv: jax.Array
    k_pe: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, slots: int, capacity: int, dtype: jnp.dtype) -> LatentCache:
        """Returns a cache of zeros; `capacity` is the rows of one slot."""
        shape = (config.num_hidden_layers, slots, capacity)
        return cls(
            jnp.zeros((*shape, config.kv_lora_rank), dtype),
            jnp.zeros((*shape, config.qk_rope_head_dim), dtype),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftCache:
    """Keys and values of the committed tokens in the drafter.

    keys: [l, slot, s, n, e], normed and rotated.
    values: [l, slot, s, n, e].
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, config: DraftConfig, slots: int, capacity: int, dtype: jnp.dtype) -> DraftCache:
        """Returns a cache of zeros; `capacity` is the rows of one slot."""
        heads = (config.num_key_value_heads, config.head_dim)
        shape = (config.num_hidden_layers, slots, capacity, *heads)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write_rows(
    cache: jax.Array, rows: jax.Array, slots: jax.Array, start: jax.Array, count: jax.Array
) -> jax.Array:
    """Returns the cache with count[b] rows of `rows` at start[b] onward in slot slots[b].

    Rows past the count or past the capacity are dropped, so nothing else is touched.

    Args:
      cache: [l, slot, s, ...].
      rows: [l, b, n, ...].
    Donates: cache, where the caller is jitted with it donated.
    """
    capacity = cache.shape[2]
    offset = jnp.arange(rows.shape[2])
    position = jnp.where(offset < count[:, None], start[:, None] + offset, capacity)
    return cache.at[:, slots[:, None], position].set(rows.astype(cache.dtype), mode="drop")
