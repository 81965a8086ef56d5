"""Invariant 5: on every mesh the tokens of one device, and its logits but for the order of sums."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.pairs import CHUNK, Ask, Programs, plans
from mesh_programs import MESHES, MeshPrograms, shared_by_eight
from test_rules import SHARED

from k26jax.checkpoint.load import load_params
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.config import DraftConfig, ModelConfig
from k26jax.model.target import arrangement
from k26jax.spec.plan import Plan
from k26jax.spec.prefill import Chunk
from k26jax.spec.step import run_steps

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture(autouse=True)
def forgotten_programs():
    """Drops a test's programs: hundreds of them, of eight devices each, end in a crash of XLA."""
    yield
    gc.collect()
    jax.clear_caches()


N_STEPS = 16
# One request is greedy, one is sampled through all filters, one without.
ASKS = [
    Ask((1, 2, 3, 11), max_tokens=N_STEPS),
    Ask((5, 6, 9), max_tokens=12, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=3),
    Ask((3,), max_tokens=12, temperature=1.1, seed=1 << 40),
]
PLANS = plans(depth=3, block_size=4, budgets=[6])


@functools.cache
def _random_pair() -> tuple[Programs, dict]:
    programs = Programs(*shared_by_eight(), capacity=40, n_steps=N_STEPS)
    return programs, programs.random_params(0)


@functools.cache
def _golden_pair(folder, drafter_folder) -> tuple[Programs, dict]:
    """A golden target with the golden drafter, or with a random one if that is not its size."""
    model = ModelConfig.from_folder(folder)
    draft = DraftConfig.from_folder(drafter_folder)
    sizes = (model.hidden_size, model.vocab_size, model.num_hidden_layers)
    fits = sizes == (draft.hidden_size, draft.vocab_size, draft.num_target_layers)
    if not fits:
        draft = replace(
            draft,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            num_target_layers=model.num_hidden_layers,
            mask_token_id=model.vocab_size - 1,
        )
    programs = Programs(model, draft, capacity=40, n_steps=N_STEPS)
    params = programs.random_params(0)
    for name, path, module in (
        ("target", folder, programs.target),
        *((("drafter", drafter_folder, programs.drafter),) if fits else ()),
    ):
        with open_checkpoint(path) as checkpoint:
            params[name] = load_params(checkpoint, module)
    return programs, params


@functools.cache
def _alone(get, *where) -> tuple[MeshPrograms, dict, np.ndarray]:
    """The programs of one device, their parameters, and what they give as logits."""
    programs, params = get(*where)
    alone = MeshPrograms(programs, (1, 1))
    return alone, params, _logits(alone, params)


@functools.cache
def _expected(number: int, get, *where) -> dict[int, list[int]]:
    """The tokens of one device under a plan."""
    alone, params, _ = _alone(get, *where)
    return alone.run(params, ASKS, PLANS[number])[0]


def _logits(programs: MeshPrograms, params) -> np.ndarray:
    """The target's logits after each token of a prompt that has several chunks' worth of ids."""
    _, out = programs.prefill(params, _chunk(programs), programs.empty_state())
    return np.asarray(out.logits)


def _chunk(programs: MeshPrograms) -> Chunk:
    ids = np.random.default_rng(5).integers(0, programs.model.vocab_size, CHUNK)
    return Chunk(
        token_ids=ids.astype(np.int32),
        count=np.int32(CHUNK),
        start=np.int32(0),
        slot=np.int32(1),
        is_last=np.bool_(True),
        max_tokens=np.int32(4),
        sampling=ASKS[0].sampling(),
    )


def _check(mesh, which, get, *where):
    """Compares the runs of some plans, and the logits, with one device's."""
    alone, params, logits = _alone(get, *where)
    on_mesh = MeshPrograms(alone, mesh)
    if on_mesh.placement is not None:
        params = on_mesh.placement.put(params)
    np.testing.assert_allclose(_logits(on_mesh, params), logits, atol=1e-4)
    for number in which:
        found, state, _ = on_mesh.run(params, ASKS, PLANS[number])
        assert found == _expected(number, get, *where), PLANS[number]
        assert all(len(set(emitted)) > 4 for emitted in found.values()) or get is _golden_pair
        assert not np.asarray(state.is_active).any()


@pytest.mark.parametrize("mesh", [pytest.param((1, 8), marks=pytest.mark.slow), (4, 2)])
def test_tokens_and_logits_on_a_mesh(mesh):
    """Trees, on eight devices in a row and on both axes at once; the rest is in the slow tests."""
    _check(mesh, [2], _random_pair)


def test_a_drafter_that_no_rank_shares_fits_into_the_programs(golden_dir):
    """Its heads do not divide by four: every rank holds it whole. Traced; slow tests run it."""
    programs, params = _golden_pair(golden_dir / "models" / "k2-like", golden_dir / "drafter")
    on_mesh = MeshPrograms(programs, (1, 4))
    whole = on_mesh.placement.specs["drafter"].values()
    assert not any(any(spec) for spec in whole)
    _, out = jax.eval_shape(on_mesh.prefill, params, _chunk(on_mesh), on_mesh.empty_state())
    assert out.logits.shape == (CHUNK, programs.model.vocab_size)


@pytest.mark.slow
def test_the_three_algorithms_emit_the_same():
    tokens = [_expected(number, _random_pair) for number in range(3)]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_and_every_algorithm(mesh):
    _check(mesh, [0, 1, 2], _random_pair)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [(name, mesh) for name, meshes in SHARED.items() for mesh in meshes]
)
def test_golden_models_on_the_meshes_they_allow(golden_dir, name, mesh):
    where = golden_dir / "models" / name, golden_dir / "drafter"
    _check(mesh, [0, 1, 2], _golden_pair, *where)


@pytest.mark.slow
def test_the_kernels_on_a_mesh():
    """Interpreted: each rank lays out its part of the INT4 experts and runs the kernels on it."""
    programs, params = _random_pair()
    on_mesh = MeshPrograms(programs, (2, 2))
    placed = on_mesh.placement.put(jax.tree.map(jnp.copy, params))
    on_mesh.target, arrange = arrangement(on_mesh.target)
    on_mesh.placement, program = on_mesh.placement.arrange(on_mesh.target, arrange)
    placed["target"] = jax.jit(program)(placed["target"])
    found, _, _ = on_mesh.run(placed, ASKS, Plan.tree(6, 3, 4, "pallas"))
    assert found == _expected(2, _random_pair)


@pytest.mark.slow
def test_no_cache_is_copied_and_the_state_is_aliased_on_a_mesh():
    """Invariant 6 holds for each rank's program; weights are used where they are."""
    programs, params = _random_pair()
    on_mesh = MeshPrograms(programs, (2, 2))
    params, state = on_mesh.placement.put(params), on_mesh.empty_state()

    def program(params, state, limit):
        return run_steps(on_mesh.models(params), state, Plan.plain(), 4, limit=limit)

    placed = on_mesh.placement.program(program, state_at=1)
    compiled = jax.jit(placed, donate_argnums=1).lower(params, state, np.int32(4)).compile()
    shards = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= shards
    text = compiled.as_text()
    assert "all-reduce" in text
    assert "all-to-all" not in text
    assert "collective-permute" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2), (4, 2)])
def test_extras_on_a_mesh(mesh):
    """Penalties and log-probabilities where ranks share the vocabulary; a tree and plain steps."""
    extras = [
        {"frequency_penalty": 0.9, "logit_bias": {63: 3.0}, "logprobs": 3},
        {"repetition_penalty": 1.3, "min_tokens": 4},
        {"logprobs": 0},
    ]
    asked = [replace(ask, extras=more) for ask, more in zip(ASKS, extras, strict=True)]
    asked[2] = replace(asked[2], bad_words=((60,), (3, 40)))
    alone, params, _ = _alone(_random_pair)
    on_mesh = MeshPrograms(alone, mesh)
    placed = on_mesh.placement.put(params)
    expected, _, one = alone.run(params, asked, PLANS[2].with_extras())
    found, _, many = on_mesh.run(placed, asked, PLANS[2].with_extras())
    assert found == expected
    for x, y in zip(many.log_probs, one.log_probs, strict=True):
        np.testing.assert_allclose(x[:, [0, 2]], y[:, [0, 2]], atol=1e-4)
    assert on_mesh.run(placed, asked, PLANS[0].with_extras())[0] == expected
    assert expected != alone.run(params, ASKS, PLANS[2])[0]
