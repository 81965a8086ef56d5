"""Copies of cache rows between slots and pages: what the prefix cache does on the device."""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from k26jax.model.cache import DraftCache, LatentCache
from k26jax.spec.state import SpecState

Index = Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Caches:
    """Both caches of some slots; or of some pages, each of which lies there like a short slot.

    cache: the target's latents.
    draft_cache: the drafter's keys and values of the same tokens; None without a drafter.
    """

    cache: LatentCache
    draft_cache: DraftCache | None

    @classmethod
    def of(cls, state: SpecState) -> Self:
        """Returns those of a state."""
        return cls(state.cache, state.draft_cache)


def keep_page(pages: Caches, slots: Caches, page: Index, slot: Index, start: Index) -> Caches:
    """Returns the pages with one of them filled from the rows at `start` of a slot.

    Donates: `pages`, where the caller is jitted with it donated.
    """

    def copy(to: jax.Array, source: jax.Array) -> jax.Array:
        return _put(to, page, 0, _rows(source, slot, start, to.shape[2]))

    return jax.tree.map(copy, pages, slots)


def take_pages(
    slots: Caches, pages: Caches, numbers: Int32[Array, "most"], count: Index, slot: Index
) -> Caches:
    """Returns the slots with the first `count` of the numbered pages at the start of one.

    Donates: `slots`, where the caller is jitted with it donated.
    """

    def one(index: jax.Array, slots: Caches) -> Caches:
        def copy(to: jax.Array, source: jax.Array) -> jax.Array:
            size = source.shape[2]
            return _put(to, slot, index * size, _rows(source, numbers[index], 0, size))

        return jax.tree.map(copy, slots, pages)

    return lax.fori_loop(0, count, one, slots)


def _rows(cache: jax.Array, place: Index, start: Index | int, size: int) -> jax.Array:
    """Returns rows of all layers [l, 1, size, ...]."""
    shape = (cache.shape[0], 1, size, *cache.shape[3:])
    return lax.dynamic_slice(cache, _at(cache, place, start), shape)


def _put(cache: jax.Array, place: Index, start: Index | int, rows: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(cache, rows, _at(cache, place, start))


def _at(cache: jax.Array, place: Index, start: Index | int) -> tuple[jax.Array, ...]:
    zero = jnp.int32(0)
    return (zero, place, jnp.int32(start), *[zero] * (cache.ndim - 3))
