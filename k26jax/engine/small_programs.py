"""Programs that change the slots' settings and nothing else; the state stays in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from k26jax.spec.adjust import Adjustments
from k26jax.spec.auto_width import AutoWidth
from k26jax.spec.state import SpecState


def _release(state: SpecState, slot: jax.Array) -> SpecState:
    return dataclasses.replace(
        state,
        remaining=state.remaining.at[slot].set(0),
        adjustments=state.adjustments.without(slot),
    )


def _adjust(state: SpecState, slot: jax.Array, row: Adjustments) -> SpecState:
    return dataclasses.replace(state, adjustments=state.adjustments.with_slot(slot, row))


def _occupy(
    state: SpecState, slot: jax.Array, length: jax.Array, max_tokens: jax.Array
) -> SpecState:
    return dataclasses.replace(
        state,
        length=state.length.at[slot].set(length),
        remaining=state.remaining.at[slot].set(max_tokens),
    )


def _set_costs(state: SpecState, contexts: jax.Array, milliseconds: jax.Array) -> SpecState:
    return dataclasses.replace(state, auto=AutoWidth.of(contexts, milliseconds))


SMALL: dict[str, Callable[..., SpecState]] = {
    "release": _release,
    "adjust": _adjust,
    "occupy": _occupy,
    "costs": _set_costs,
}
