"""Shards in the published layout: Kimi K2.6's file sizes to the byte, the library's own bytes."""

import json
from collections import Counter

import jax
import ml_dtypes
import numpy as np
import pytest
from config.published import glm_47_flash, k2_instruct, k26
from fixtures.converted import golden_folders, load
from safetensors import safe_open
from safetensors.numpy import load_file, save

from k26jax.checkpoint.index import read_header
from k26jax.checkpoint.models import with_layers
from k26jax.checkpoint.published import Shard, TensorSpec, plan_shards, write_shard
from k26jax.checkpoint.shaped import shaped_shards, write_shaped
from k26jax.checkpoint.verify import verify
from k26jax.config import ModelConfig
from k26jax.errors import CapacityError, CheckpointError

VISION_BYTES = 108_556_344 + 833_769_904


def test_kimi_k26_files_have_the_published_sizes():
    shards = shaped_shards(k26())
    sizes = [shard.file_bytes for shard in shards]
    assert sizes[0] == 995_001_888
    assert sizes[1:10] == [9_809_047_464] * 9
    assert sizes[10:61] == [9_809_050_936] * 51
    assert sizes[61:] == [4_697_635_160]
    assert sum(sizes) + VISION_BYTES == 595_177_988_208
    assert sum(len(shard.tensors) for shard in shards) == 208_215
    assert Counter(len(shard.tensors) for shard in shards) == {12: 1, 3470: 60, 3: 1}
    assert shards[1].name == "model-00002-of-000062.safetensors"


def random_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "b.weight": rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16),
        "a.weight": rng.standard_normal((2, 2)).astype(ml_dtypes.bfloat16),
        "c.words": rng.integers(-9, 9, (4, 1), np.int32),
        "c.shape": np.array([4, 8], np.int64),
        "c.bias": rng.standard_normal(5).astype(np.float32),
        "d.half": rng.standard_normal(6).astype(np.float16),
        "e.bytes": rng.integers(0, 9, 7).astype(np.uint8),
    }


def test_a_shard_is_what_the_safetensors_library_writes(tmp_path):
    tensors = random_tensors()
    codes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64",
             "uint8": "U8"}  # fmt: skip
    specs = [TensorSpec(n, codes[v.dtype.name], v.shape) for n, v in tensors.items()]
    (shard,) = plan_shards([specs])
    write_shard(tmp_path, shard, lambda tensor: iter([tensors[tensor.name]]))
    written = (tmp_path / "model.safetensors").read_bytes()
    assert len(written) == shard.file_bytes
    expected = save(tensors)
    length = int.from_bytes(expected[:8], "little")
    ours = json.loads(written[8 : len(shard.header)])
    assert list(ours) == list(json.loads(expected[8 : 8 + length]))
    assert written == expected
    assert {e.name: e.shape for e in read_header(tmp_path / shard.name)} == {
        name: value.shape for name, value in tensors.items()
    }


def test_values_that_do_not_fill_their_tensor_are_an_error(tmp_path):
    shard = Shard("a.safetensors", (TensorSpec("x", "F32", (4,)),))
    with pytest.raises(AssertionError):
        write_shard(tmp_path, shard, lambda tensor: iter([np.zeros(3, np.float32)]))
    assert not (tmp_path / shard.name).exists()


def test_any_golden_configuration_gives_a_model_that_loads(golden_dir, tmp_path):
    for folder in golden_folders(golden_dir / "models"):
        config = json.loads((folder / "config.json").read_text())
        target = tmp_path / folder.name
        shards = write_shaped(config, target, seed=1)
        found = verify(target)
        assert not found.faults, folder.name
        params = load(target)
        assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
        assert [(target / shard.name).stat().st_size for shard in shards] == [
            shard.file_bytes for shard in shards
        ]


def test_seeds_and_layers(golden_dir, tmp_path):
    folder = golden_folders(golden_dir / "models")[0]
    config = json.loads((folder / "config.json").read_text())
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_shaped(with_layers(config, 2), tmp_path / name, seed=seed)
    files = [sorted((tmp_path / name).glob("*.safetensors")) for name in "abc"]
    assert [path.name for path in files[0]] == [path.name for path in files[2]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(files[0], files[1], strict=True))
    assert any(a.read_bytes() != c.read_bytes() for a, c in zip(files[0], files[2], strict=True))
    layers = {n.split(".layers.")[1].split(".")[0] for f in files[0] for n in load_file(f)
              if ".layers." in n}  # fmt: skip
    assert layers == {"0", "1"}
    # Two tensors of one shape are not the same numbers.
    values = [v.tobytes() for f in files[0] for v in load_file(f).values() if v.ndim == 2]
    assert len(set(values)) == len(values)


def test_layers_that_a_configuration_lists_one_by_one_are_cut_too():
    config = ModelConfig.from_dict(with_layers(glm_47_flash(), 3))
    assert (config.num_hidden_layers, config.dense_layer_ids) == (3, (0,))
    assert glm_47_flash()["num_hidden_layers"] == 47


def test_fp8_models_get_fp8_weights_and_block_scales(tmp_path):
    config = k2_instruct()
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "n_routed_experts": 4, "vocab_size": 512,
             "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 96,
             "intermediate_size": 384, "moe_intermediate_size": 160, "num_experts_per_tok": 2,
             "eos_token_id": 3, "bos_token_id": 1, "pad_token_id": 2}  # fmt: skip
    write_shaped(config | sizes, tmp_path / "fp8")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    index = json.loads((tmp_path / "fp8/model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(tmp_path / "fp8" / index[name], "numpy") as file:
        assert file.get_slice(name).get_dtype() == "F8_E4M3"
        assert file.get_slice(f"{name}_scale_inv").get_shape() == [2, 2]
    assert not verify(tmp_path / "fp8").faults
    assert load(tmp_path / "fp8")


def test_a_target_in_use_and_a_disk_too_small_are_refused(golden_dir, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "keep").write_text("x")
    config = json.loads((golden_folders(golden_dir / "models")[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match="not empty"):
        write_shaped(config, tmp_path / "a")
    with pytest.raises(CheckpointError, match="is no folder"):
        write_shaped(config, tmp_path / "a" / "keep")
    huge = k26()
    huge["text_config"]["hidden_size"] <<= 12
    with pytest.raises(CapacityError, match="bytes of disk"):
        write_shaped(huge, tmp_path / "b")
    assert not (tmp_path / "b").exists()
