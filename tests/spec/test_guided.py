"""Masks at every node: the same tokens under every algorithm, whatever the masks forbid."""

from __future__ import annotations

import zlib

import jax
import numpy as np
import pytest
from fixtures.pairs import Ask, plans, tiny_programs
from fixtures.quick import quick_jit
from jax.sharding import PartitionSpec

from k26jax.sharding.mesh import make_mesh, on_mesh
from k26jax.sharding.rules import MODEL
from k26jax.spec.guided import as_steps, blank_between, propose, settle
from k26jax.spec.masks import all_allowed, mask_logits
from k26jax.spec.plan import Plan

VOCABULARY = 7
ASKS = [
    Ask((1, 2, 3), max_tokens=14),
    Ask((4,), max_tokens=20, temperature=1.2, seed=3),
    Ask((2, 5), max_tokens=17, temperature=0.8, top_k=3, seed=9),
]


def allowed_after(path: tuple[int, ...]) -> int:
    """The bits of the tokens that may follow a path: some of the seven, by its hash."""
    return zlib.crc32(bytes(path)) & 0x7F or 1


def masks_of(trees, prefixes: list[tuple[int, ...]]) -> np.ndarray:
    slots, width = trees.token_ids.shape
    masks = all_allowed(slots, width, vocab_size=VOCABULARY)
    for slot, prefix in enumerate(prefixes):
        paths = [prefix]
        for row in range(1, width):
            parent = trees.parent[slot, row]
            paths.append((*paths[max(parent, 0)], int(trees.token_ids[slot, row])))
        for row in np.flatnonzero(trees.valid[slot]):
            masks[slot, row] = allowed_after(paths[row])
    return masks


def run(programs, params, plan) -> tuple[list[tuple[int, ...]], list[int]]:
    """What the slots emit after their first tokens, and how many nodes each step accepted."""
    trees_of = quick_jit(lambda params, state: propose(programs.models(params), state, plan))
    rest_of = quick_jit(
        lambda params, state, trees, masks: settle(
            programs.models(params), state, trees, masks, plan
        )
    )
    state, first = programs.admit(params, ASKS, fill=np.nan)
    prefixes = [(*ask.prompt, first[slot]) for slot, ask in enumerate(ASKS)]
    lengths = []
    while np.asarray(state.is_active).any():
        trees = jax.device_get(trees_of(params, state))
        state, accepted = rest_of(params, state, trees, masks_of(trees, prefixes))
        steps = as_steps(jax.device_get(accepted), trees)
        lengths += steps.accepted_len[0].tolist()
        for slot, count in enumerate(steps.emitted_len[0]):
            prefixes[slot] += tuple(steps.tokens[0, slot, :count].tolist())
    return prefixes, lengths


def test_the_tokens_are_those_of_plain_decoding_under_the_same_masks():
    programs = tiny_programs()
    params = programs.random_params(1)
    expected, _ = run(programs, params, Plan.plain())
    for ask, found in zip(ASKS, expected, strict=True):
        start = len(ask.prompt) + 1
        assert len(found) == len(ask.prompt) + ask.max_tokens
        for end in range(start, len(found)):
            assert allowed_after(found[:end]) >> found[end] & 1
    found, lengths = run(programs, params, Plan.tree(6, 4, 5))
    assert found == expected
    assert max(lengths) > 2


def test_blank_trees_have_the_shapes_of_the_real_ones():
    programs = tiny_programs()
    for plan in plans(4, 5, [6]):
        trees, masks = blank_between(3, plan, VOCABULARY)
        params, state = programs.random_params(1), programs.empty_state()
        found = jax.eval_shape(
            lambda p, s, plan=plan: propose(programs.models(p), s, plan), params, state
        )
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (trees, found)]
        assert shapes[0] == shapes[1]
        assert masks.shape == (3, plan.width, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_masked_logits_are_minus_infinity_and_the_others_as_they_were(ranks):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 72)).astype(np.float32)
    masks = rng.integers(0, 1 << 32, (2, 3, 3), dtype=np.uint32)
    columns = PartitionSpec(None, None, MODEL)
    program = on_mesh(mask_logits, make_mesh(ranks, 1), (columns, PartitionSpec()), columns)
    found = np.asarray(jax.jit(program)(logits, masks))
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")[..., :72]
    np.testing.assert_array_equal(found, np.where(bits, logits, -np.inf))
