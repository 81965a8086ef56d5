"""The grammars of the requests in the slots: a mask for every node of every tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from k26jax.engine.loading import Loaded
from k26jax.engine.request import Request
from k26jax.model.parameters import Params
from k26jax.spec.guided import as_steps, blank_between, propose, settle
from k26jax.spec.masks import all_allowed
from k26jax.spec.state import Models, SpecState
from k26jax.spec.step import Steps
from k26jax.spec.tree import Tree
from k26jax.text.grammar import Grammars, Guide

GUIDED = ("propose", "settle")


class Guiding:
    """Which slots follow a grammar, and where they are in it.

    Args:
        vocab_size: of the model.
    """

    def __init__(self, grammars: Grammars, vocab_size: int):
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
        masks = all_allowed(1, vocab_size=self._vocab_size)
        self._grammars.fill(self._guides[slot].collect([0], [-1], masks, 0), masks)
        return masks[0]

    def masks(self, trees: Tree) -> np.ndarray:
        """Returns the masks of all nodes, uint32 [slots, nodes, words].

        Args:
            trees: one a slot, on the host.

        Cost: a copy of a matcher and a mask for each node that the grammar allows.
        """
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

    def step(
        self,
        program: Callable[[str], Callable[..., Any]],
        params: Params,
        state: SpecState,
        *,
        record_trees: bool,
    ) -> tuple[SpecState, Steps]:
        """Returns the state one step on and what the step emitted, on the host; two dispatches.

        Args:
            program: gives the compiled program of a name.
        """
        state, trees = program("propose")(params, np.int32(0), state)
        # From the host: so they go to all devices of a mesh alike.
        trees = jax.device_get(trees)
        state, accepted = program("settle")(params, (trees, self.masks(trees)), state)
        accepted = jax.device_get(accepted)
        for slot in self._guides:
            self.advance(slot, accepted.tokens[slot, : accepted.emitted_len[slot]].tolist())
        return state, as_steps(accepted, trees if record_trees else None)


def guided_program(
    name: str, loaded: Loaded, models_of: Callable[[Params], Models]
) -> tuple[Callable[..., Any], Any]:
    """Returns one of the two programs of a step, function(params, between, state), and what stands
    for what is between them.

    With extras, which cost nothing where no slot asks: one program settles all steps.
    """
    plan, config = loaded.plan.with_extras(), loaded.config

    def propose_trees(params: Params, _: jax.Array, state: SpecState):
        return state, propose(models_of(params), state, plan)

    def settle_trees(params: Params, between: tuple[Tree, jax.Array], state: SpecState):
        return settle(models_of(params), state, *between, plan)

    if name == "propose":
        return propose_trees, np.int32(0)
    vocab_size = loaded.models.target.config.vocab_size
    return settle_trees, blank_between(config.max_running_requests, plan, vocab_size)
