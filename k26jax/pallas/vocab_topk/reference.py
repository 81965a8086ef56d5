"""The best tokens of rows of logits, in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32


class TopTokens(NamedTuple):
    """The best tokens of every row, best first, equal logits by lowest id."""

    ids: Int32[Array, "t k"]
    logits: Float32[Array, "t k"]
    log_probs: Float32[Array, "t k"]
    """NaN or minus infinity for a logit of minus infinity."""
    log_total: Float32[Array, "t"]
    """Logarithm of the sum of exp(logits): log_probs are logits less this."""


def best_token(
    logits: Float[Array, "t w"],
) -> tuple[Int32[Array, "t"], Float32[Array, "t"]]:
    """Returns the id of the largest logit of every row, ties to the lowest, and the logit.

    The first NaN counts as the largest.
    """
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return ids, jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0].astype(jnp.float32)


def top_tokens(logits: Float[Array, "t w"], count: int) -> TopTokens:
    """Returns the best `count` tokens of every row.

    Args:
      count: at most w.
    """
    logits = logits.astype(jnp.float32)
    # lax.top_k puts -0 behind 0; they are equal logits.
    logits = jnp.where(logits == 0, 0.0, logits)
    top, ids = lax.top_k(logits, count)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    return TopTokens(ids.astype(jnp.int32), top, top - log_total[:, None], log_total)
