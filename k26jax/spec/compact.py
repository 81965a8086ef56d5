"""Stage compact: the accepted rows become the newest rows of both caches."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from k26jax.model.cache import DraftCache, LatentCache
from k26jax.model.target import Rows
from k26jax.pallas.norm import append
from k26jax.spec.accept import Accepted
from k26jax.spec.state import Models, SpecState


class PathRows(NamedTuple):
    """The rows of an accepted path that the caches are made from; as in `Rows`."""

    c_kv: Float[Array, "l b path c"]
    k_pe: Float[Array, "l b path r"]
    features: Float[Array, "b path features"]


def compact(
    models: Models, state: SpecState, rows: Rows, accepted: Accepted, kernels: str = "reference"
) -> SpecState:
    """Returns the state with the accepted path committed, in order, and a new anchor.

    A node of depth j was rotated for position length + j and lands in that row, so nothing is
    rotated again; the drafter's rows come from the target features of the same nodes.

    Donates: both caches of `state`, where the caller is jitted with it donated.
    """
    return commit_accepted(models, state, path_rows(rows, accepted), accepted, kernels)


def path_rows(rows: Rows, accepted: Accepted) -> PathRows:
    """Returns the rows of the accepted path, in order; its padding takes the root's."""
    return PathRows(
        c_kv=_take(rows.c_kv, accepted.path[None]),
        k_pe=_take(rows.k_pe, accepted.path[None]),
        features=_take(rows.features, accepted.path),
    )


def commit_accepted(
    models: Models,
    state: SpecState,
    taken: PathRows,
    accepted: Accepted,
    kernels: str = "reference",
) -> SpecState:
    """Returns the state with `path_rows` committed, as far as they are emitted; see `compact`."""
    slots = jnp.arange(state.anchor.shape[0])
    where = {"slots": slots, "start": state.length, "count": accepted.emitted_len}
    return dataclasses.replace(
        state,
        cache=commit_latents(state.cache, taken, **where, kernels=kernels),
        draft_cache=commit_features(models, state, taken, **where, kernels=kernels),
        anchor=accepted.bonus_token,
        length=state.length + accepted.emitted_len,
        remaining=accepted.remaining,
    )


def commit_latents(
    cache: LatentCache,
    rows: Rows | PathRows,
    *,
    slots: Int32[Array, "b"],
    start: Int32[Array, "b"],
    count: Int32[Array, "b"],
    kernels: str = "reference",
) -> LatentCache:
    """Returns the target's cache with count[b] of the given rows at start[b] of slot slots[b]."""
    parts = (cache.c_kv, cache.k_pe), (rows.c_kv, rows.k_pe)
    return LatentCache(*append(*parts, slots, start, count, kernels=kernels))


def commit_features(
    models: Models,
    state: SpecState,
    rows: Rows | PathRows,
    *,
    slots: Int32[Array, "b"],
    start: Int32[Array, "b"],
    count: Int32[Array, "b"],
    kernels: str = "reference",
) -> DraftCache | None:
    """Returns the drafter's cache with rows of the same places; None without a drafter."""
    draft_cache = state.draft_cache
    if models.drafter is None or draft_cache is None or not rows.features.shape[-1]:
        return draft_cache
    positions = start[:, None] + jnp.arange(rows.features.shape[1])
    new = models.drafter.context_rows(rows.features, positions, kernels)
    parts = (draft_cache.keys, draft_cache.values), (new.keys, new.values)
    return DraftCache(*append(*parts, slots, start, count, kernels=kernels))


def _take(rows: jax.Array, path: jax.Array) -> jax.Array:
    return jnp.take_along_axis(rows, path[..., None], axis=-2)
