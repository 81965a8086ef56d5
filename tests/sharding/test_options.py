"""--tp-size, --ep-size and the options of several processes: defaults, spellings, refusals."""

from __future__ import annotations

import argparse

import jax
import numpy as np
import pytest
from folders import write_shared_pair

from k26jax import LLM, SamplingParams
from k26jax.commands.options import add_engine_options, engine_options
from k26jax.config import EngineConfig
from k26jax.engine.loading import load, prepare
from k26jax.engine.memory import tree_bytes
from k26jax.errors import CapacityError, MeshError, RequestError
from k26jax.model.parameters import arrays


@pytest.fixture(scope="module")
def shared(golden_dir, tmp_path_factory) -> dict:
    return write_shared_pair(golden_dir, tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (None, 1, None, None, None)),
        (["--tp-size", "4", "--ep-size", "2"], (4, 2, None, None, None)),
        (["--tensor-parallel-size", "4", "--expert-parallel-size", "2"], (4, 2, None, None, None)),
        (["-tp", "8"], (8, 1, None, None, None)),
        (
            ["--dist-init-addr", "host:1", "--nnodes", "2", "--node-rank", "1"],
            (None, 1, "host:1", 2, 1),
        ),
    ],
)
def test_flags_and_their_other_names(flags, expected):
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    args = parser.parse_args(["--model-path", "folder", *flags])
    config = EngineConfig(**engine_options(args, {}))
    names = ("tp_size", "ep_size", "coordinator_address", "num_processes", "process_id")
    assert tuple(getattr(config, name) for name in names) == expected


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"tp_size": 0}, "tp_size = 0, expected an integer from 1"),
        ({"ep_size": "2"}, "ep_size = '2', expected an integer"),
        ({"num_processes": 2}, "coordinator_address and process_id missing"),
        ({"coordinator_address": "host:1"}, "num_processes and process_id missing"),
        (
            {"coordinator_address": "host", "num_processes": 2, "process_id": 0},
            "coordinator_address = 'host', expected host:port",
        ),
        (
            {"coordinator_address": "host:65536", "num_processes": 2, "process_id": 0},
            "coordinator_address = 'host:65536', expected host:port, with a port from 1 to 65535",
        ),
        (
            {"coordinator_address": "host:1", "num_processes": 2, "process_id": 2},
            "process_id = 2, expected 0 to 1",
        ),
        ({"distributed_timeout": 1}, "distributed_timeout = 1, expected an integer from 2"),
    ],
)
def test_options_that_do_not_fit_together(options, mention):
    with pytest.raises(RequestError, match=mention):
        EngineConfig(model_path="folder", **options)
    EngineConfig(model_path="folder", coordinator_address="auto")


def test_without_sizes_one_device_runs_the_model(shared):
    """Eight are there; a mesh is never made unasked."""
    prepared = prepare(EngineConfig(**shared))
    assert jax.device_count() == 8
    assert prepared.placement is None
    assert prepared.cluster is None
    assert prepared.leads


def test_meshes_that_cannot_be_are_refused_before_a_weight_is_read(shared):
    with pytest.raises(MeshError, match="takes 16 devices, and there are 8"):
        prepare(EngineConfig(**shared, tp_size=16))
    with pytest.raises(MeshError, match=r"moe.*\[1, 8, .* 3 ranks .* can be 1, 2, 4 or 8"):
        prepare(EngineConfig(**shared, ep_size=3))


def test_memory_is_asked_for_on_each_device(shared, monkeypatch):
    prepared = prepare(EngineConfig(**shared, tp_size=4, ep_size=2))
    whole = sum(tree_bytes(arrays(m)) for m in vars(prepared.models).values())
    held = prepared.weight_bytes()
    assert whole / 8 < held < whole / 2
    per_device = []
    monkeypatch.setattr(
        "k26jax.engine.memory.available_bytes", lambda d: per_device.append(len(d)) or held - 1
    )
    with pytest.raises(CapacityError, match="on each of 8 devices"):
        prepared.require_memory(weights=held)
    assert per_device == [8]


def test_each_device_holds_its_part_and_the_folder_is_what_was_loaded(shared):
    """The published folder, cut on reading, is the one that a single device reads."""
    alone = load(prepare(EngineConfig(**shared, compile_cache_dir="none")))
    progress = []
    config = EngineConfig(**shared, compile_cache_dir="none", tp_size=2, ep_size=4)
    cut = load(prepare(config), lambda *seen: progress.append(seen))
    for whole, parts in zip(
        jax.tree.leaves(alone.params), jax.tree.leaves(cut.params), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(whole), np.asarray(parts))
    packed = cut.params["target"]["moe"]["gate_proj"]["weight_packed"]
    assert packed.addressable_shards[0].data.shape == (1, 2, 128, 4)
    for what in ("drafter", "target"):
        *_, (_, done, total) = [seen for seen in progress if seen[0] == what]
        assert done == total


def test_the_api_on_a_mesh(shared):
    """LLM with tp_size and ep_size, without a drafter: generate, and logits of whole rows."""
    options = shared | {"speculative_algorithm": "NONE", "compile_cache_dir": "none"}
    with LLM(**options, tp_size=2, ep_size=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate([1, 2, 3], params, raise_on_error=True)
        ids = output.outputs[0].token_ids
        logits = llm.logits([1, 2, 3, *ids[:-1]])
        assert llm.leads
        llm.follow()  # returns at once: there is nobody to follow
    assert logits.shape == (8, 64)
    assert logits[2:].argmax(axis=-1).tolist() == ids
