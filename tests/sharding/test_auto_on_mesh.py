"""An automatic budget on a mesh: every rank makes the same choice, and the tokens stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixtures.pairs import Ask, Programs
from mesh_programs import MeshPrograms, shared_by_eight

from k26jax.spec.auto_width import AutoWidth
from k26jax.spec.plan import Plan

ASKS = [Ask((1, 2, 3, 11), max_tokens=16), Ask((5, 6), max_tokens=9, temperature=0.8, seed=3), None]
COSTS = [[1.0, 1.1, 1.2, 1.25]]


class _AutoPrograms(Programs):
    def empty_state(self, fill: float = 0.0):
        return replace(super().empty_state(fill), auto=AutoWidth.of([0.0], COSTS))


class _AutoMeshPrograms(MeshPrograms, _AutoPrograms):
    pass


@pytest.mark.slow
def test_ranks_choose_alike():
    programs = _AutoPrograms(*shared_by_eight(), capacity=40, n_steps=16)
    params = programs.random_params(0)
    plain = Programs(programs.model, programs.draft, capacity=40, n_steps=16)
    expected, _, _ = plain.run(params, ASKS, Plan.plain())
    mesh = _AutoMeshPrograms(programs, (1, 2))
    found, state, steps = mesh.run(mesh.placement.put(params), ASKS, Plan.auto((1, 3, 7), 3, 4))
    assert found == expected
    assert {3, 7} & set(steps.rows[: steps.n_run].tolist())
    assert float(state.auto.promised) > 0
