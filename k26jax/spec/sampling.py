"""Choosing tokens: greedy, or by Gumbel noise that depends on seed and position alone.

Noise keyed by position makes speculative sampling emit exactly the tokens of plain sampling: a
position's draw is the same whichever tree node, slot or batch asks for it. Where ranks share the
vocabulary each has the logits of its tokens, and one (token, value) pair a rank decides.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from k26jax.pallas.vocab_topk import best_token
from k26jax.sharding.collectives import best_over_ranks, own_columns, ranks, whole_rows
from k26jax.sharding.rules import MODEL
from k26jax.spec.state import Sampling


def choose(
    logits: Float32[Array, "b t w"],
    base: Int32[Array, "b"],
    offset: Int32[Array, "b t"],
    sampling: Sampling,
    most: int,
    kernels: str = "reference",
) -> Int32[Array, "b t"]:
    """Returns one token per row; the row's token is for position base + offset + 1.

    Temperature 0 takes the largest logit, ties to the lowest id. Otherwise the largest of
    logits / temperature + Gumbel noise, after top_k, then top_p, then min_p.

    Args:
      logits: of this rank's tokens.
      offset: from 0 to `most`.
    """
    held = logits.shape[-1]

    def greedy(_: None) -> jax.Array:
        ids, values = best_token(logits.reshape(-1, held), kernels=kernels)
        ids = best_over_ranks(ids, values, MODEL, held)[0]
        return ids.reshape(logits.shape[:-1])

    def sampled(_: None) -> jax.Array:
        hot = sampling.temperature > 0
        scaled = logits / jnp.where(hot, sampling.temperature, 1.0)[:, None, None]
        filtered = lax.cond(
            (hot & _has_filter(sampling)).any(), lambda x: _filter(x, sampling), lambda x: x, scaled
        )
        noise = own_columns(gumbel(sampling.seed, base, most, held * ranks(MODEL)), MODEL)
        noisy = filtered + jnp.take_along_axis(noise, offset[..., None], axis=1)
        ids = jnp.argmax(noisy, axis=-1)
        best = jnp.take_along_axis(noisy, ids[..., None], axis=-1)[..., 0]
        ids = best_over_ranks(ids, best, MODEL, held)[0]
        return jnp.where(hot[:, None], ids, greedy(None)).astype(jnp.int32)

    return lax.cond((sampling.temperature > 0).any(), sampled, greedy, None)


def gumbel(
    seed: UInt32[Array, "b 2"], base: Int32[Array, "b"], most: int, width: int
) -> Float32[Array, "b {most}+1 {width}"]:
    """Returns Gumbel noise for positions base + 1 onward."""

    def one(words: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        key = jax.random.fold_in(key, position)
        return jax.random.gumbel(key, (width,), jnp.float32)

    positions = base[:, None] + 1 + jnp.arange(most + 1)
    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(seed, positions)


def _has_filter(sampling: Sampling) -> jax.Array:
    return (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)


def _filter(scaled: jax.Array, sampling: Sampling) -> jax.Array:
    """Sets the logits [b, t, w] outside top_k, top_p and min_p to -inf; ties with the last kept
    value stay. What is kept depends on the whole vocabulary."""
    descending = -jnp.sort(-whole_rows(scaled, MODEL), axis=-1)
    width = descending.shape[-1]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, width)[:, None, None]
    in_k = jnp.arange(width) < top_k
    probability = jax.nn.softmax(jnp.where(in_k, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = in_k & ((before < sampling.top_p[:, None, None]) | (jnp.arange(width) == 0))
    kept &= probability >= sampling.min_p[:, None, None] * probability[..., :1]
    lowest = jnp.where(kept, descending, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(scaled >= lowest, scaled, -jnp.inf)
