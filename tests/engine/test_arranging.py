"""The experts change their layout one product at a time, and memory is asked for it beforehand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k26jax.config import EngineConfig
from k26jax.engine import arranging, memory
from k26jax.engine.loading import load, prepare
from k26jax.errors import CapacityError
from k26jax.model.parameters import arrays
from k26jax.model.target import Target, arrangement


@pytest.fixture(scope="module")
def prepared(golden_dir):
    folder = golden_dir / "models" / "k2-int4"
    return prepare(EngineConfig(folder, kernels="pallas", dtype="bfloat16", context_length=64))


def test_turns_give_the_layout_that_all_at_once_gives(prepared):
    target = prepared.models.target
    config, dtype = target.config, jnp.bfloat16
    params = arrays(Target(config, dtype=dtype, rngs=nnx.Rngs(0)))
    whole, arrange = arrangement(target)
    expected = jax.jit(arrange)(params)
    params = jax.tree.map(jnp.copy, params)
    for turn in arranging.turns(target, None):
        params = arranging.run(turn, params)
        assert jax.tree.structure(arrays(turn.target)) == jax.tree.structure(params)
    assert jax.tree.structure(params) == jax.tree.structure(arrays(whole))
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_turn_counts_what_a_device_holds_twice(prepared, golden_dir):
    held = arrays(arrangement(prepared.models.target)[0])["moe"]["experts"]
    sizes = {
        product: memory.tree_bytes([held[f"{product}_words"], held[f"{product}_scales"]])
        for product in ("gate_up", "down")
    }
    found = [turn.new_bytes for turn in arranging.turns(prepared.models.target, None)]
    assert found == list(sizes.values())
    folder = golden_dir / "models" / "k2-int4"
    spread = prepare(EngineConfig(folder, kernels="pallas", dtype="bfloat16", ep_size=2))
    halves = [turn.new_bytes for turn in arranging.turns(spread.models.target, spread.placement)]
    assert halves == [size // 2 for size in found]


def test_both_layouts_are_counted_before_weights_are_read(prepared, monkeypatch):
    twice = max(turn.new_bytes for turn in arranging.turns(prepared.models.target, None))
    cache = memory.tree_bytes(prepared.state_shapes())
    assert twice > cache
    room = prepared.weight_bytes() + cache + 1
    monkeypatch.setattr(memory, "available_bytes", lambda *_: room)
    with pytest.raises(CapacityError, match=r"experts in a second layout"):
        load(prepared)
