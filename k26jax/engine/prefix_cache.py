"""The prefix cache: what prompts left in both caches, kept in pages for prompts that begin alike.

A page is one whole chunk of a prefill (`chunked_prefill_size` tokens). A hit copies pages into the
request's slot on the device; decoding knows nothing of it. Only rows that a prefill computed are
kept, and only at the borders of its chunks: so a hit has the bits of the prefill that it saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.stages import Compiled

from k26jax.engine.loading import Loaded
from k26jax.engine.page_tree import PageTree
from k26jax.engine.placement import places_of
from k26jax.spec.pages import Caches, keep_page, take_pages
from k26jax.spec.prefill import Chunk
from k26jax.spec.state import SpecState

TAKE, KEEP = PROGRAMS = ("take_pages", "keep_page")


class PrefixCache:
    """The pages of one runner, on the device, and the tree that knows what they hold.

    Args:
        program: gives the compiled program of a name.
    """

    def __init__(self, loaded: Loaded, program: Callable[[str], Callable[..., Any]]):
        self._loaded, self._program = loaded, program
        self._pages: Caches | None = None
        self.tree = PageTree(loaded.prefix_pages, loaded.page_tokens)

    @property
    def is_lost(self) -> bool:
        """Whether there are no pages yet, or an interrupted program has lost them."""
        return self._pages is None or any(x.is_deleted() for x in jax.tree.leaves(self._pages))

    def reset(self) -> None:
        """Makes empty pages in place of those there are."""
        self._pages = None
        self.tree = PageTree(self.tree.pages, self.tree.page_tokens)
        self._pages = self._loaded.make_pages()

    def close(self) -> None:
        """Frees the pages."""
        self._pages = None

    def take(self, state: SpecState, slot: int, token_ids: Sequence[int]) -> tuple[SpecState, int]:
        """Returns the state with the kept start of a prompt in its slot, and its length.

        The prompt is under way until `release`.

        Donates: both caches of `state`.
        """
        found = self.tree.open(slot, token_ids)
        if not found:
            return state, 0
        numbers = np.zeros(self._most, np.int32)
        numbers[: len(found)] = found
        caches = self._program(TAKE)(
            Caches.of(state), self._pages, numbers, np.int32(len(found)), np.int32(slot)
        )
        state = dataclasses.replace(state, cache=caches.cache, draft_cache=caches.draft_cache)
        return state, len(found) * self.tree.page_tokens

    def keep(self, state: SpecState, slot: int, chunk: Chunk) -> None:
        """Keeps what a chunk left in its slot, if it is a whole page that is not kept yet."""
        count, start = int(chunk.count), int(chunk.start)
        if count != self.tree.page_tokens:
            return
        page = self.tree.add(slot, start, np.asarray(chunk.token_ids).tolist())
        if page is None:
            return
        pages, self._pages = self._pages, None  # lost, unless the program ends
        self._pages = self._program(KEEP)(
            pages, Caches.of(state), np.int32(page), np.int32(slot), np.int32(start)
        )

    def release(self, slot: int) -> None:
        """Ends the prompt of a slot, whole or not; its pages stay until others need the room."""
        self.tree.close(slot)

    def compile(self, name: str) -> Compiled:
        """Returns one of `PROGRAMS`, compiled."""
        pages, slots = self._loaded.page_shapes(), Caches.of(self._loaded.state_shapes())
        zero = np.int32(0)
        if name == KEEP:
            program, arguments = keep_page, (pages, slots, zero, zero, zero)
        else:
            numbers = np.zeros(self._most, np.int32)
            program, arguments = take_pages, (slots, pages, numbers, zero, zero)
        places = None if self._loaded.placement is None else places_of(arguments[0])
        return jax.jit(program, donate_argnums=0, out_shardings=places).lower(*arguments).compile()

    @property
    def _most(self) -> int:
        """Pages that one slot has room for."""
        return max(self._loaded.context_length // self.tree.page_tokens, 1)
