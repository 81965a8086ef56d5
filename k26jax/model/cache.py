"""The latent cache of the target and the key-value cache of the drafter, in fixed slots."""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from k26jax.config import DraftConfig, ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """What MLA keeps of each token; rows at or past a slot's length are out of use.

    c_kv: the latent after its norm.
    k_pe: the shared rotary key after rotation.
    """

    c_kv: Float[Array, "l slot s c"]
    k_pe: Float[Array, "l slot s r"]

    @classmethod
    def empty(cls, config: ModelConfig, slots: int, capacity: int, dtype: DTypeLike) -> Self:
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

    keys: normed and rotated.
    values: as projected.
    """

    keys: Float[Array, "draft_l slot s kv_head width"]
    values: Float[Array, "draft_l slot s kv_head width"]

    @classmethod
    def empty(cls, config: DraftConfig, slots: int, capacity: int, dtype: DTypeLike) -> Self:
        """Returns a cache of zeros; `capacity` is the rows of one slot."""
        heads = (config.num_key_value_heads, config.head_dim)
        shape = (config.num_hidden_layers, slots, capacity, *heads)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
