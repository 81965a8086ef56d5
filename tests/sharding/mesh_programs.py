"""The programs of a pair on a mesh of fake devices, and models that such meshes can share."""

from __future__ import annotations

import functools
from dataclasses import replace

from fixtures.pairs import Programs, tiny_configs
from fixtures.quick import quick_jit

from k26jax.config import DraftConfig, ModelConfig
from k26jax.engine.placement import Placement, place
from k26jax.sharding.mesh import make_mesh
from k26jax.spec.prefill import prefill
from k26jax.spec.state import Models
from k26jax.spec.step import run_steps

MESHES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 4), (8, 1), (4, 2)]  # (expert, model)


def placement_of(programs: Programs, mesh: tuple[int, int]) -> Placement | None:
    """How the pair is spread over a mesh of the first fake devices."""
    return place(make_mesh(mesh[1], mesh[0]), Models(programs.target, programs.drafter))


class MeshPrograms(Programs):
    """`Programs` whose every program runs on a mesh; tests use them alike."""

    def __init__(self, like: Programs, mesh: tuple[int, int]):
        super().__init__(like.model, like.draft, like.slots, like.capacity, like.n_steps)
        self.placement = placement_of(like, mesh)
        self._steps = {}

    def _jit(self, program, state_at: int):
        if self.placement is not None:
            program = self.placement.program(program, state_at=state_at)
        return quick_jit(program)

    def empty_state(self, fill: float = 0.0):
        make = functools.partial(super().empty_state, fill)
        return make() if self.placement is None else self.placement.state_maker(make)()

    @functools.cached_property
    def prefill(self):
        def program(params, chunk, state):
            return prefill(self.models(params), chunk, state, all_logits=True)

        return self._jit(program, 2)

    def steps(self, plan, record_trees: bool = False):
        # Kept with the object: the programs of all meshes together exhaust a process's mappings.
        key = plan, record_trees
        if key not in self._steps:
            self._steps[key] = self._make_steps(plan, record_trees)
        return self._steps[key]

    def _make_steps(self, plan, record_trees: bool):
        def program(params, state, limit):
            return run_steps(
                self.models(params),
                state,
                plan,
                self.n_steps,
                limit=limit,
                record_trees=record_trees,
            )

        return self._jit(program, 1)


def shared_by_eight(vocab_size: int = 64) -> tuple[ModelConfig, DraftConfig]:
    """A K2-shaped INT4 target and a drafter, small, that every mesh of up to eight can share."""
    model, draft = tiny_configs(
        vocab_size, num_attention_heads=8, moe_intermediate_size=256, num_hidden_layers=2
    )
    draft = replace(
        draft,
        num_hidden_layers=1,
        windows=(None,),
        causal=(False,),
        num_attention_heads=8,
        num_key_value_heads=8,
        num_target_layers=2,
        target_layer_ids=(0, 1),
    )
    return model, draft
