"""The grammars of the requests in the slots: a mask for every node of every tree."""

from __future__ import annotations

import numpy as np

from k26jax.engine.request import Request
from k26jax.errors import RequestError
from k26jax.spec.masks import all_allowed
from k26jax.spec.tree import Tree
from k26jax.text.grammar import Grammars, Guide


class Guiding:
    """Which slots follow a grammar, and where they are in it.

    Args:
        grammars: None where no request has one.
        vocab_size: of the model.
    """

    def __init__(self, grammars: Grammars | None, vocab_size: int):
        self._grammars, self._vocab_size = grammars, vocab_size
        self._guides: dict[int, Guide] = {}
        self._free = all_allowed(vocab_size=vocab_size)

    @property
    def is_needed(self) -> bool:
        """Whether a slot follows a grammar."""
        return bool(self._guides)

    def begin(self, slot: int, request: Request) -> None:
        """Notes the request that a slot is given.

        Raises: RequestError if its grammar cannot be had.
        """
        self._guides.pop(slot, None)
        structure = request.params.structured_outputs
        if structure is not None:
            if self._grammars is None:
                raise RequestError("structured_outputs are given, but this engine has no grammars")
            self._guides[slot] = self._grammars.guide(structure)

    def end(self, slot: int) -> None:
        """Forgets a slot's grammar."""
        self._guides.pop(slot, None)

    def clear(self) -> None:
        """Forgets all grammars."""
        self._guides.clear()

    def first_mask(self, slot: int) -> np.ndarray:
        """Returns the mask of the first token of a slot's answer, uint32 [words]."""
        if slot not in self._guides:
            return self._free
        assert self._grammars is not None
        masks = all_allowed(1, vocab_size=self._vocab_size)
        self._grammars.fill(self._guides[slot].collect([0], [-1], masks, 0), masks)
        return masks[0]

    def masks(self, trees: Tree) -> np.ndarray:
        """Returns the masks of all nodes, uint32 [slots, nodes, words].

        Args:
            trees: one a slot, on the host.

        Cost: a copy of a matcher and a mask for each node that the grammar allows.
        """
        assert self._grammars is not None
        slots, width = trees.token_ids.shape
        masks = all_allowed(slots * width, vocab_size=self._vocab_size)
        found = []
        for slot, guide in self._guides.items():
            token_ids, parents = trees.token_ids[slot].tolist(), trees.parent[slot].tolist()
            found += guide.collect(token_ids, parents, masks, slot * width)
        self._grammars.fill(found, masks)
        return masks.reshape(slots, width, -1)

    def advance(self, slot: int, token_ids: list[int]) -> None:
        """Moves a slot on by tokens that it emitted."""
        if slot in self._guides:
            self._guides[slot].advance(token_ids)

    def advance_all(self, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Moves all slots on by what a step emitted.

        Args:
            tokens, counts: by slot, as `Accepted` has them.
        """
        for slot in self._guides:
            self.advance(slot, tokens[slot, : counts[slot]].tolist())
