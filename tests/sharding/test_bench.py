"""The benchmark's made-up models, and its command on fake devices."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.paths import REPOSITORY
from mesh_programs import shared_by_eight

from k26jax.bench.dummy import dummy_engine, plan_of
from k26jax.bench.mesh import Row, all_reduce_seconds, models
from k26jax.config import EngineConfig
from k26jax.sharding.rules import MODEL


def _engine(kernels: str = "reference", **sizes):
    model, draft = shared_by_eight()
    config = EngineConfig(model_path="dummy", context_length=64, **sizes)
    plan, _ = plan_of(4, draft, kernels)
    return dummy_engine(config, model, draft, plan, jnp.float32)


@pytest.mark.slow
def test_every_mesh_has_the_same_made_up_model():
    alone, cut = _engine(), _engine(tp_size=2, ep_size=4)
    for one, parts in zip(jax.tree.leaves(alone.params), jax.tree.leaves(cut.params), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(parts))
    weights = alone.params["target"]["self_attn"]["o_proj"]
    assert abs(float(weights.std()) * weights.shape[-1] ** 0.5 - 1) < 0.1
    words = np.asarray(alone.params["target"]["moe"]["up_proj"]["weight_packed"])
    nibbles = words[..., None] >> np.arange(0, 32, 4) & 15
    shares = np.bincount(nibbles.ravel(), minlength=16) / nibbles.size
    # 8 stands for zero, and in the place of 0 too, so that weights have no mean.
    wanted = np.full(16, 1 / 16)
    wanted[[0, 8]] = 0, 1 / 8
    assert np.abs(shares - wanted).max() < 0.01


def test_experts_are_made_as_each_rank_reads_them():
    engine = _engine("pallas", tp_size=4, ep_size=2)
    experts = engine.params["target"]["moe"]["experts"]
    words = experts["gate_up_words"]
    assert words.dtype == jnp.int16
    shard = words.addressable_shards[0].data.shape
    assert (words.shape[1] // shard[1], words.shape[2] // shard[2]) == (2, 4)
    scales = np.asarray(experts["down_scales"]).view(jnp.bfloat16)
    assert (scales > 0).all()
    assert (scales < 0.1).all()


def test_the_shape_of_kimi_and_of_its_drafter():
    model, draft = models("kimi-k2.6", 61, 6)
    assert (model.vocab_size, model.num_attention_heads, model.n_routed_experts) == (
        163840,
        64,
        384,
    )
    assert (model.moe_intermediate_size, model.intermediate_size) == (2048, 18432)
    draft.check_target(model)
    assert len(draft.target_layer_ids) == 6
    assert (draft.num_hidden_layers, draft.intermediate_size) == (6, 18432)


def test_what_follows_from_a_row():
    record = Row(8, 0.01, 122, 1e-5).record()
    assert record["all_reduce_share"] == pytest.approx(0.122)
    assert record["tokens_a_second_at_accept_length"]["4"] == pytest.approx(400)
    assert list(Row(1, 0.01, 1, 0).record()["tokens_a_second_at_accept_length"]) == ["1"]


@pytest.mark.slow
def test_an_all_reduce_is_timed_on_the_mesh_alone():
    engine = _engine(tp_size=2)
    assert dataclasses.asdict(engine.config)["tp_size"] == 2
    assert engine.placement.mesh.shape[MODEL] == 2
    assert all_reduce_seconds(_engine(), 1, 32) == 0


@pytest.mark.slow
def test_the_command_checks_times_and_writes(tmp_path, capsys):
    path = REPOSITORY / "scripts" / "bench_mesh.py"
    spec = importlib.util.spec_from_file_location("bench_mesh", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "out.json"
    flags = "--config small --layers 2 --draft-layers 1 --tp-size 2 --width 1,8 --context 64"
    more = f"--kernels reference --dtype float32 --dispatches 1 --check-layers 2 --json {out}"
    assert script.main([*flags.split(), *more.split()]) == 0
    found = json.loads(out.read_text())
    assert [item["layers"] for item in found["checks"]] == [3, 3, 2]
    assert all(item["equal"] == item["tokens"] and item["agree"] for item in found["checks"])
    # Embedding, and two sums a layer; with a tree the same for the drafter.
    assert [row["all_reduces"] for row in found["rows"]] == [5, 8]
    assert all(row["step_seconds"] > 0 for row in found["rows"])
    # One, eight and 64 rows of 1024 numbers, in two forms.
    sizes = [item["bytes"] for item in found["all_reduces"]]
    assert sizes == [4096, 4096, 32768, 32768, 262144, 262144]
    assert "tokens/s at accept length" in capsys.readouterr().out
