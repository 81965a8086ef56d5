"""Attention over key blocks with a running softmax: the arithmetic the reference kernels share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from k26jax.pallas.products import contract

KEY_BLOCK = 128
_MASKED = -1e30

Block = tuple[jax.Array, jax.Array, jax.Array]


def streaming_attention(
    query: jax.Array,
    load: Callable[[jax.Array], Block],
    n_blocks: jax.Array,
    last: Block,
    scale: float,
) -> jax.Array:
    """Returns softmax(scale * query . keys) . values, float32 [b, t, n, g, v].

    Blocks are taken in order, then `last`; so a row's sums never depend on how many rows there
    are. Masked keys count exactly zero, whatever they hold.

    Args:
      query: [b, t, n, g, e]; g query heads share each of the n key heads.
      load: block number -> (keys [b, s, n, e], values [b, s, n, v], visible [b, t, s]).
      n_blocks: number of blocks, traced.
      last: one more block, in which every row must see at least one key.
    """
    values = last[1]
    rows = query.shape[:-1]
    carry = (
        jnp.full(rows, _MASKED, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, values.shape[-1]), jnp.float32),
    )
    carry = lax.fori_loop(
        0, n_blocks, lambda block, state: _absorb(query, load(block), scale, state), carry
    )
    _, total, weighted = _absorb(query, last, scale, carry)
    return weighted / total[..., None]


def _absorb(query: jax.Array, block: Block, scale: float, state: Block) -> Block:
    keys, values, visible = block
    highest, total, weighted = state
    seen = visible[:, :, None, None, :]
    scores = contract("btnge,bsne->btngs", query, keys)
    scores = jnp.where(seen, scores * scale, _MASKED)
    new_highest = jnp.maximum(highest, scores.max(axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - new_highest[..., None]), 0.0)
    shrink = jnp.exp(highest - new_highest)
    # A key that nobody may see can hold NaN, and zero times NaN is NaN.
    held = jnp.where(visible.any(axis=1)[:, :, None, None], values, 0)
    update = contract("btngs,bsnv->btngv", weights.astype(query.dtype), held)
    return (
        new_highest,
        total * shrink + weights.sum(axis=-1),
        weighted * shrink[..., None] + update,
    )
