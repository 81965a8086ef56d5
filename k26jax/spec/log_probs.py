"""The target's own log-probabilities of what was emitted, and its most likely tokens there.

They are those of the logits as the target gives them, before temperature, filters, penalties and
biases: what plain decoding would tell, whatever the tree and the settings.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from k26jax.config import MAX_LOGPROBS
from k26jax.pallas.vocab_topk import top_tokens
from k26jax.sharding.collectives import (
    log_total_over_ranks,
    rank,
    ranks,
    sum_over_ranks,
    top_over_ranks,
)
from k26jax.sharding.rules import MODEL


class LogProbs(NamedTuple):
    """What the target thought of tokens, which stand side by side; zeros where nobody asks.

    chosen: log-probability of the token.
    rank: its place among all tokens, the most likely one's being 1.
    top_ids: the most likely tokens, best first, ties by lowest id.
    top: their log-probabilities.
    """

    chosen: Float32[Array, "b path"]
    rank: Int32[Array, "b path"]
    top_ids: Int32[Array, "b path k"]
    top: Float32[Array, "b path k"]


def log_probs_of(
    logits: Float32[Array, "b t w"],
    path: Int32[Array, "b path"],
    tokens: Int32[Array, "b path"],
    is_asked: Bool[Array, "b"],
    kernels: str = "reference",
) -> LogProbs:
    """Returns the log-probabilities of tokens[b, i] in the row path[b, i] of the logits.

    Args:
      logits: of this rank's tokens.
      is_asked: slots that want to be told; if none does, nothing is computed.

    Cost: reads the rows of the path twice.
    """
    count = min(MAX_LOGPROBS, logits.shape[-1] * ranks(MODEL))

    def told(logits: jax.Array) -> LogProbs:
        rows = jnp.take_along_axis(logits, path[..., None], axis=1)
        return _log_probs(rows, tokens, count, kernels)

    def silent(logits: jax.Array) -> LogProbs:
        number = jnp.zeros(tokens.shape, jnp.int32)
        ids = jnp.zeros((*tokens.shape, count), jnp.int32)
        return LogProbs(number.astype(jnp.float32), number, ids, ids.astype(jnp.float32))

    return lax.cond(is_asked.any(), told, silent, logits)


def _log_probs(rows: jax.Array, tokens: jax.Array, count: int, kernels: str) -> LogProbs:
    shape, held = tokens.shape, rows.shape[-1]
    top = top_tokens(rows.reshape(-1, held), min(count, held), kernels=kernels)
    total = log_total_over_ranks(top.log_total, MODEL).reshape(shape)
    top_ids, best = top_over_ranks(top.ids, top.logits, MODEL, held, count)
    column = tokens - rank(MODEL) * held
    is_here = (column >= 0) & (column < held)
    chosen = jnp.take_along_axis(rows, jnp.clip(column, 0, held - 1)[..., None], axis=-1)[..., 0]
    chosen = sum_over_ranks(jnp.where(is_here, chosen, 0.0), MODEL)
    larger = (rows > chosen[..., None]).sum(axis=-1, dtype=jnp.int32)
    return LogProbs(
        chosen=chosen - total,
        rank=sum_over_ranks(larger, MODEL).astype(jnp.int32) + 1,
        top_ids=top_ids.reshape(*shape, count),
        top=best.reshape(*shape, count) - total[..., None],
    )
