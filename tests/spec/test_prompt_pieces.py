"""A prompt through the attention kernel: what XLA's attention gives, and one arithmetic in pieces.

Interpreted; `tests/e2e/test_gpu_tokens.py` runs it on a GPU.
"""

import functools

import jax
import numpy as np
import pytest
from fixtures.pairs import tiny_configs
from fixtures.quick import quick_jit

from k26jax.bench.dummy import dummy_engine, plan_of
from k26jax.config import EngineConfig
from k26jax.engine.runner import Runner
from k26jax.model import prompt
from k26jax.model.parameters import bind
from k26jax.spec.prefill import prefill
from k26jax.spec.state import Models

WIDTH, START, COUNT = 20, 37, 18


@pytest.fixture(scope="module")
def engine():
    model, draft = tiny_configs(64, num_hidden_layers=2)
    config = EngineConfig(model_path="dummy", context_length=64, max_running_requests=2)
    plan, _ = plan_of(4, draft, "reference")
    loaded = dummy_engine(config, model, draft, plan, np.dtype("float32"))
    return loaded, Runner(loaded)


def filled(engine, kernels: str, count: int = COUNT):
    """State and logits after a chunk behind another one, in slot 1; the rest of it holds NaN."""
    loaded, runner = engine

    def program(params, chunk, state):
        models = Models(bind(loaded.models.target, params["target"]), None)
        return prefill(models, chunk, state, all_logits=True, kernels=kernels)

    tokens = [int(x) for x in np.random.default_rng(3).integers(1, 60, START + WIDTH)]
    runner.reset()
    first = runner._chunk(1, tokens[:START], 0, START, None)
    state, _ = quick_jit(functools.partial(program))(loaded.params, first, runner.state)
    poisoned = jax.tree.map(lambda x: x.at[:, 1, START:].set(np.nan), state.cache)
    state = jax.tree.map(lambda x: x, state)
    state = type(state)(**{**vars(state), "cache": poisoned})
    second = runner._chunk(1, tokens[START : START + count], START, WIDTH, None)
    state, out = quick_jit(program)(loaded.params, second, state)
    rows = [np.asarray(x)[:, 1, : START + count] for x in jax.tree.leaves(state.cache)]
    beyond = [np.asarray(x)[:, 1, START + count :] for x in jax.tree.leaves(state.cache)]
    assert all(np.isnan(part).all() for part in beyond)
    return np.asarray(out.logits)[:count], rows


@pytest.fixture(scope="module")
def whole(engine):
    """In one piece."""
    return filled(engine, "pallas")


def test_logits_and_cache_are_those_of_the_reference(engine, whole):
    wanted, wanted_rows = filled(engine, "reference")
    np.testing.assert_allclose(whole[0], wanted, rtol=1e-4, atol=1e-4)
    for one, other in zip(whole[1], wanted_rows, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_pieces_have_the_bits_of_one(engine, whole, monkeypatch):
    monkeypatch.setattr(prompt, "PIECE_ROWS", 8)
    found, rows = filled(engine, "pallas")
    np.testing.assert_array_equal(found, whole[0])
    for one, other in zip(rows, whole[1], strict=True):
        np.testing.assert_array_equal(one, other)
