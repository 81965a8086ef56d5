"""The device state of all slots between two steps, and the two models that advance it."""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from k26jax.config import MAX_STOP_IDS, DraftConfig, ModelConfig
from k26jax.model.cache import DraftCache, LatentCache
from k26jax.model.drafter import Drafter
from k26jax.model.target import Target
from k26jax.spec.adjust import Adjustments
from k26jax.spec.auto_width import AutoWidth


@dataclass(frozen=True)
class Models:
    """The target and, where tokens are drafted, its drafter."""

    target: Target
    drafter: Drafter | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output the drafter reads."""
        return self.drafter.config.target_layer_ids if self.drafter else ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How each slot chooses tokens.

    temperature: 0: greedy.
    top_k: 0: off.   top_p: 1: off.   min_p: 0: off.
    seed: the key of the slot's noise.
    stop_ids: MAX_STOP_IDS of them, padded with -1.
    tells_log_probs: whether the log-probabilities of the slot's tokens are asked for.
    """

    temperature: Float32[Array, "b"]
    top_k: Int32[Array, "b"]
    top_p: Float32[Array, "b"]
    min_p: Float32[Array, "b"]
    seed: UInt32[Array, "b 2"]
    stop_ids: Int32[Array, "b stops"]
    tells_log_probs: Bool[Array, "b"]

    @classmethod
    def empty(cls, slots: int) -> Self:
        """Returns greedy settings without stop ids."""
        return cls(
            temperature=jnp.zeros(slots, jnp.float32),
            top_k=jnp.zeros(slots, jnp.int32),
            top_p=jnp.ones(slots, jnp.float32),
            min_p=jnp.zeros(slots, jnp.float32),
            seed=jnp.zeros((slots, 2), jnp.uint32),
            stop_ids=jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32),
            tells_log_probs=jnp.zeros(slots, bool),
        )

    def with_slot(self, slot: jax.Array, row: Self) -> Self:
        """Returns all slots with those of one replaced, which are given as one row."""
        return jax.tree.map(lambda all_, one: all_.at[slot].set(one[0]), self, row)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpecState:
    """Everything a decoding step reads and writes; the slots stand side by side.

    cache: latents of the committed tokens.
    draft_cache: the drafter's keys and values of the same tokens; None without a drafter.
    anchor: the newest token: emitted, not yet run through the target.
    length: committed tokens before the anchor; the anchor's absolute position.
    remaining: tokens the slot may still emit; 0: the slot is idle or done.
    sampling: how each slot chooses tokens.
    adjustments: what each slot changes of the logits before.
    auto: what the next step's rows are chosen by; None where all steps have as many.
    """

    cache: LatentCache
    draft_cache: DraftCache | None
    anchor: Int32[Array, "slot"]
    length: Int32[Array, "slot"]
    remaining: Int32[Array, "slot"]
    sampling: Sampling
    adjustments: Adjustments
    auto: AutoWidth | None = None

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        draft_config: DraftConfig | None,
        *,
        slots: int,
        capacity: int,
        dtype: DTypeLike,
        auto: AutoWidth | None = None,
    ) -> Self:
        """Returns idle slots; `capacity` is the tokens one slot can hold."""
        draft_cache = (
            DraftCache.empty(draft_config, slots, capacity, dtype) if draft_config else None
        )
        return cls(
            cache=LatentCache.empty(config, slots, capacity, dtype),
            draft_cache=draft_cache,
            anchor=jnp.zeros(slots, jnp.int32),
            length=jnp.zeros(slots, jnp.int32),
            remaining=jnp.zeros(slots, jnp.int32),
            sampling=Sampling.empty(slots),
            adjustments=Adjustments.empty(slots, config.vocab_size),
            auto=auto,
        )

    @property
    def is_active(self) -> Bool[Array, "slot"]:
        """Whether each slot still emits tokens."""
        return self.remaining > 0


def seed_words(seed: int) -> UInt32[np.ndarray, "2"]:
    """Returns the noise key of an integer seed (taken modulo 2**64)."""
    seed %= 1 << 64
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
