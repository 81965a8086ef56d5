"""Stage prefill: runs a chunk of a prompt and commits all of it; the last chunk chooses a token."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k26jax.model.mla import Context
from k26jax.spec.accept import cut_at_stop
from k26jax.spec.compact import commit
from k26jax.spec.sampling import choose
from k26jax.spec.state import Models, Sampling, SpecState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of one prompt for one slot.

    token_ids: int32 [t], padded with 0.
    count: int32, tokens that count.
    start: int32, position of the first.
    slot: int32.
    is_last: bool, whether the prompt ends here and the first token is chosen.
    max_tokens: int32, tokens the request may emit.
    sampling: the request's settings, one row.
    """

    token_ids: jax.Array
    count: jax.Array
    start: jax.Array
    slot: jax.Array
    is_last: jax.Array
    max_tokens: jax.Array
    sampling: Sampling


class Prefilled(NamedTuple):
    """first_token: int32, the chosen token (meaningful after the last chunk).

    logits: float32 [t, w] if all rows were asked for, else [1, w], the last row's.
    """

    first_token: jax.Array
    logits: jax.Array


def prefill(
    models: Models, chunk: Chunk, state: SpecState, *, all_logits: bool = False, kernels: str
) -> tuple[SpecState, Prefilled]:
    """Returns the state with the chunk committed to its slot, and the token chosen after it.

    The chunk is verified like a chain: each token sees the slot's earlier ones and those before it.

    Donates: both caches of `state`, where the caller is jitted with it donated.
    """
    width = chunk.token_ids.shape[0]
    slots, start, count = chunk.slot[None], chunk.start[None], chunk.count[None]
    rows = models.target.forward(
        chunk.token_ids[None],
        (chunk.start + jnp.arange(width))[None],
        Context(state.cache, slots, start, jnp.asarray(causal_words(width))[None]),
        valid=(jnp.arange(width) < chunk.count)[None],
        taps=models.taps,
        kernels=kernels,
    )
    cache, draft_cache = commit(models, state, rows, slots=slots, start=start, count=count)
    last_row = jnp.maximum(chunk.count - 1, 0)
    hidden = rows.hidden[0] if all_logits else rows.hidden[0, last_row][None]
    logits = models.target.logits(hidden)
    last_logits = logits[last_row] if all_logits else logits[0]
    position = chunk.start + chunk.count
    first_token = choose(
        last_logits[None, None], position[None] - 1, jnp.zeros((1, 1), jnp.int32), chunk.sampling, 0
    )[0, 0]
    _, stopped = cut_at_stop(first_token[None, None], jnp.ones(1, int), chunk.sampling.stop_ids)
    remaining = jnp.where(chunk.is_last & ~stopped[0], chunk.max_tokens - 1, 0)
    slot = chunk.slot
    state = dataclasses.replace(
        state,
        cache=cache,
        draft_cache=draft_cache,
        anchor=state.anchor.at[slot].set(first_token),
        length=state.length.at[slot].set(position),
        remaining=state.remaining.at[slot].set(remaining),
        sampling=jax.tree.map(
            lambda all_, one: all_.at[slot].set(one[0]), state.sampling, chunk.sampling
        ),
    )
    return state, Prefilled(first_token, logits)


def causal_words(width: int) -> np.ndarray:
    """Returns the ancestor words of a chain, uint32 [width, ceil(width / 32)]."""
    bits = np.tril(np.ones((width, width), bool))
    padded = np.pad(bits, ((0, 0), (0, -width % 32))).reshape(width, -1, 32)
    return (padded * (np.uint32(1) << np.arange(32, dtype=np.uint32))).sum(-1, dtype=np.uint32)
