"""Which tokens may come after each node: bits over the vocabulary, put on the target's logits.

A masked row chooses among the allowed tokens alone, greedy or sampled; a node whose token its
parent may not choose is never accepted, and neither is what hangs below it. The masks depend on a
node's path alone, so every algorithm chooses as plain decoding does.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32

from k26jax.sharding.collectives import own_columns, ranks
from k26jax.sharding.rules import MODEL

WORD = 32


def mask_words(vocab_size: int) -> int:
    """Returns the words of a mask over a vocabulary."""
    return -(-vocab_size // WORD)


def all_allowed(*shape: int, vocab_size: int) -> UInt32[np.ndarray, "..."]:
    """Returns masks [*shape, words] that leave every token."""
    return np.full((*shape, mask_words(vocab_size)), 0xFFFFFFFF, np.uint32)


def mask_logits(
    logits: Float32[Array, "b t w"], allowed: UInt32[Array, "b t bits"]
) -> Float32[Array, "b t w"]:
    """Returns the logits with -inf for every token that is not allowed; the others as they are.

    Args:
      logits: of this rank's tokens.
      allowed: of the whole vocabulary; bit j % 32 of word j // 32 is token j's.

    Cost: fused into the choice; reads ceil(w / 32) words a row.
    """
    bits = allowed[..., None] >> jnp.arange(WORD, dtype=jnp.uint32) & 1
    width = logits.shape[-1] * ranks(MODEL)
    is_allowed = bits.reshape(*allowed.shape[:-1], -1)[..., :width] != 0
    return jnp.where(own_columns(is_allowed, MODEL), logits, -jnp.inf)
