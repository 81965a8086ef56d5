"""Invariant 6: many steps in one program, state donated and aliased, no copies, no late compile."""

from __future__ import annotations

import re

import jax
import numpy as np
from fixtures.pairs import CAPACITY, Ask, tiny_programs

from k26jax.spec.plan import Plan
from k26jax.spec.step import run_steps


def _compiled(plan: Plan, n_steps: int = 4):
    programs = tiny_programs()
    params, state = programs.random_params(0), programs.empty_state()
    program = jax.jit(
        lambda params, state: run_steps(programs.models(params), state, plan, n_steps),
        donate_argnums=1,
    )
    return program.lower(params, state).compile(), state


def test_the_whole_state_is_donated_and_aliased():
    for plan in (Plan.plain(), Plan.tree(6, 4, 5)):
        compiled, state = _compiled(plan)
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes


def test_no_cache_is_copied_inside_the_program():
    compiled, state = _compiled(Plan.tree(6, 4, 5))
    caches = {tuple(leaf.shape) for leaf in jax.tree.leaves((state.cache, state.draft_cache))}
    copied = {
        tuple(int(n) for n in match.split(",") if n)
        for match in re.findall(r"= \w+\[([\d,]*)\][^=\n]* copy\(", compiled.as_text())
    }
    assert caches
    assert not caches & copied


def test_a_dispatch_stops_when_all_slots_are_done():
    programs = tiny_programs()
    params = programs.random_params(3)
    asked = [Ask((1, 2), max_tokens=4), None, Ask((3,), max_tokens=9)]
    tokens, state, steps = programs.run(params, asked, Plan.plain())
    assert steps.n_run == 8
    assert [len(tokens[0]), len(tokens[2])] == [4, 9]
    assert not np.asarray(state.is_active).any()
    assert not steps.emitted_len[:, 1].any()


def test_limit_bounds_the_steps_of_a_dispatch():
    programs = tiny_programs()
    params = programs.random_params(3)
    _, state, steps = programs.run(params, [Ask((1, 2)), None, None], Plan.plain(), limit=3)
    assert steps.n_run == 3
    assert int(state.length[0]) == 5


def test_every_prompt_length_up_to_the_context_ends_at_it():
    """T36: near the end of the context nothing is written past it, and no token is lost."""
    programs = tiny_programs()
    params = programs.random_params(4)
    for left in range(1, 8):
        prompt = tuple(np.random.default_rng(left).integers(0, 7, CAPACITY - left).tolist())
        asked = [None, Ask(prompt, max_tokens=left), None]
        plain, _, _ = programs.run(params, asked, Plan.plain())
        for plan in (Plan.chain(4, 5), Plan.tree(24, 4, 5)):
            found, _, _ = programs.run(params, asked, plan)
            assert found == plain
            assert len(found[1]) == left
