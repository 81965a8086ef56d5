"""Stage prefill: runs a chunk of a prompt and commits all of it; the last chunk chooses a token."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from k26jax.model.mla import Context
from k26jax.model.prompt import PromptContext
from k26jax.model.target import Rows
from k26jax.pallas.bits import pack_bits
from k26jax.sharding.collectives import whole_rows
from k26jax.sharding.rules import MODEL
from k26jax.spec.accept import cut_at_stop
from k26jax.spec.compact import commit_features, commit_latents
from k26jax.spec.extras import choose_first
from k26jax.spec.log_probs import LogProbs
from k26jax.spec.state import Models, Sampling, SpecState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of one prompt for one slot.

    token_ids: padded with 0.
    count: tokens that count.
    start: position of the first.
    slot: the slot they go to.
    is_last: whether the prompt ends here and the first token is chosen.
    max_tokens: tokens the request may emit.
    sampling: the request's settings, one row.
    allowed: the tokens that the first one may be, as `mask_logits` takes them; None: all.
    """

    token_ids: Int32[Array, "t"]
    count: Int32[Array, ""]
    start: Int32[Array, ""]
    slot: Int32[Array, ""]
    is_last: Bool[Array, ""]
    max_tokens: Int32[Array, ""]
    sampling: Sampling
    allowed: UInt32[Array, "bits"] | None = None


class Prefilled(NamedTuple):
    """What the target says after a chunk.

    first_token: the chosen token (meaningful after the last chunk).
    logits: of all rows if they were asked for, else of the last row alone.
    log_probs: of the first token, if the request asks for them.
    """

    first_token: Int32[Array, ""]
    logits: Float32[Array, "rows w"]
    log_probs: LogProbs


def prefill(
    models: Models,
    chunk: Chunk,
    state: SpecState,
    *,
    all_logits: bool = False,
    kernels: str = "reference",
) -> tuple[SpecState, Prefilled]:
    """Returns the state with the chunk committed to its slot, and the token chosen after it.

    The chunk is verified like a chain: each token sees the slot's earlier ones and those before it.
    XLA's own products run it, whatever drafts: the kernels are made for few rows.

    Args:
      all_logits: of all rows, and not of the last one alone.
      kernels: of attention over the cache.

    Donates: both caches of `state`, where the caller is jitted with it donated.
    """
    rows, state = _committed(models, chunk, state, kernels)
    last_row = jnp.maximum(chunk.count - 1, 0)
    hidden = rows.hidden[0] if all_logits else rows.hidden[0, last_row][None]
    logits = models.target.logits(hidden)
    last_logits = logits[last_row] if all_logits else logits[0]
    position = chunk.start + chunk.count
    first_token, log_probs, adjustments = choose_first(
        last_logits,
        position,
        chunk.slot,
        chunk.is_last,
        chunk.sampling,
        state.adjustments,
        chunk.allowed,
    )
    _, stopped = cut_at_stop(first_token[None, None], jnp.ones(1, int), chunk.sampling.stop_ids)
    remaining = jnp.where(chunk.is_last & ~stopped[0], chunk.max_tokens - 1, 0)
    slot = chunk.slot
    state = dataclasses.replace(
        state,
        anchor=state.anchor.at[slot].set(first_token),
        length=state.length.at[slot].set(position),
        remaining=state.remaining.at[slot].set(remaining),
        sampling=state.sampling.with_slot(slot, chunk.sampling),
        adjustments=adjustments,
    )
    return state, Prefilled(first_token, whole_rows(logits, MODEL), log_probs)


def _committed(
    models: Models, chunk: Chunk, state: SpecState, kernels: str
) -> tuple[Rows, SpecState]:
    """Returns the chunk's rows, and the state with both caches holding them."""
    width = chunk.token_ids.shape[0]
    where: dict[str, Any] = {
        "slots": chunk.slot[None],
        "start": chunk.start[None],
        "count": chunk.count[None],
    }
    context = _context(chunk, state, kernels)
    rows = models.target.forward(
        chunk.token_ids[None],
        (chunk.start + jnp.arange(width))[None],
        context,
        valid=(jnp.arange(width) < chunk.count)[None],
        taps=models.taps,
    )
    if isinstance(context, PromptContext):
        cache = context.cache
    else:
        cache = commit_latents(state.cache, rows, **where)
    draft_cache = commit_features(models, state, rows, **where)
    return rows, dataclasses.replace(state, cache=cache, draft_cache=draft_cache)


def _context(chunk: Chunk, state: SpecState, kernels: str) -> Context | PromptContext:
    width = chunk.token_ids.shape[0]
    if kernels == "reference":
        ancestors = pack_bits(jnp.tri(width, dtype=bool)[None])
        return Context(state.cache, chunk.slot[None], chunk.start[None], ancestors)
    return PromptContext(
        state.cache,
        slot=chunk.slot,
        start=chunk.start,
        count=chunk.count,
        width=width,
        kernels=kernels,
    )
