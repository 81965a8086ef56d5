"""convert: the same parameters and tokens, readable by Orbax alone, and published bits back."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint.published_tensors import quantize_fp8
from fixtures.converted import (
    convert_folder,
    copy_model,
    golden_folders,
    int4_golden,
    library_tensors,
    load,
)
from fixtures.paths import REPOSITORY
from fixtures.shards import write_shard
from safetensors.numpy import load_file

from k26jax import LLM, SamplingParams
from k26jax.checkpoint.convert import ConvertOptions, convert, plan_conversion
from k26jax.checkpoint.export import export, plan_export
from k26jax.checkpoint.manifest import OUTSIDE_LAYERS, layer_name, read_manifest
from k26jax.checkpoint.models import declared_model
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.config import ModelConfig
from k26jax.errors import CheckpointError, ConfigError
from k26jax.model.parameters import declarations

PAIR = [REPOSITORY / "checkpoints" / name for name in ("k26-tiny", "k26-tiny-dflash")]


def pytest_generate_tests(metafunc):
    if "any_model" in metafunc.fixturenames:
        found = golden_folders(Path(metafunc.config.getoption("--golden-dir"))) + PAIR
        metafunc.parametrize("any_model", found, ids=[path.name for path in found])


@pytest.fixture(scope="module")
def int4(golden_dir, tmp_path_factory):
    """An INT4 golden model and its converted folder."""
    source = copy_model(int4_golden(golden_dir), tmp_path_factory.mktemp("int4") / "source")
    return source, convert_folder(source, source.parent / "converted")


def test_any_model_loads_the_same_and_goes_back_to_the_same_bits(any_model, tmp_path):
    source = copy_model(any_model, tmp_path / "source")
    converted = convert_folder(source, tmp_path / "converted")
    jax.tree.map(np.testing.assert_array_equal, load(converted), load(source))
    export(plan_export(converted, tmp_path / "back"))
    with open_checkpoint(source, num_hidden_layers=declared_model(source).layers) as checkpoint:
        unused = set(checkpoint.skipped)
    kept = {name: item for name, item in library_tensors(source).items() if name not in unused}
    assert library_tensors(tmp_path / "back") == kept
    for path in source.glob("*.json"):
        if "index" not in path.name:
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "back"), load(source))


def test_tokens_of_a_converted_pair_are_the_published_pairs(small_pair, tmp_path, compile_cache):
    prompt, params = small_pair.letters[:9], SamplingParams(temperature=0, max_tokens=24)
    options = dict(small_pair.options)
    tokens = []
    for convert_it in (False, True):
        if convert_it:
            for key in ("model_path", "speculative_draft_model_path"):
                options[key] = str(convert_folder(Path(options[key]), tmp_path / key))
        with LLM(**options) as llm:
            tokens.append(llm.generate(prompt, params, raise_on_error=True)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) > 1


def test_a_tree_is_plain_orbax_in_the_declared_layout(int4):
    source, converted = int4
    layers = ModelConfig.from_folder(source).num_hidden_layers
    declared = declarations(declared_model(source).module)
    stacks = load(source)
    checkpointer = ocp.PyTreeCheckpointer()
    for name in [*map(layer_name, range(layers)), OUTSIDE_LAYERS]:
        tree = checkpointer.restore(converted / name)
        assert tree
        for path, found in jax.tree_util.tree_leaves_with_path(tree):
            keys = [key.key for key in path]
            source_of = declared[".".join(keys)].source
            expected = stacks
            for key in keys:
                expected = expected[key]
            if source_of.layers is not None:
                expected = expected[source_of.layers.index(int(name.removeprefix("layer_")))]
            np.testing.assert_array_equal(np.asarray(found, expected.dtype), expected, err_msg=name)


def test_values_are_stored_uncompressed_with_the_published_dtypes(int4):
    source, converted = int4
    manifest = read_manifest(converted)
    published = {e.name: e for e in open_checkpoint(source).entries.values()}
    for tree, array in manifest.arrays():
        entry = published[manifest.prefix + array.tensors[0]]
        assert (array.dtype, array.tensor_shape) == (entry.dtype, entry.shape), tree.name
    for tree in manifest.trees:
        stored = sum(p.stat().st_size for p in (converted / tree.name).rglob("*") if p.is_file())
        assert tree.size_bytes <= stored <= tree.size_bytes + 100_000


def test_two_conversions_say_the_same(int4, tmp_path):
    source, converted = int4
    again = convert_folder(source, tmp_path / "again")
    name = "k26jax_manifest.json"
    assert (again / name).read_bytes() == (converted / name).read_bytes()
    assert not list(again.glob("*journal*")) + list(again.glob("*lock*"))
    assert not (tmp_path / "again.partial").exists()


def test_fp8_blocks_become_bfloat16(tmp_path, golden_dir):
    source = next(
        folder
        for folder in sorted((golden_dir / "models").iterdir())
        if ModelConfig.from_folder(folder).quantization.name == "NONE"
        and (folder / "model.safetensors").exists()
    )
    tensors, meanings = load_file(source / "model.safetensors"), {}
    for name, value in list(tensors.items()):
        if "self_attn" in name and value.ndim == 2:
            tensors[name], tensors[f"{name}_scale_inv"], meanings[name] = quantize_fp8(
                value.astype(np.float32)
            )
    folder = tmp_path / "fp8"
    folder.mkdir()
    write_shard(folder / "model.safetensors", tensors)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    converted = convert_folder(folder, tmp_path / "converted")
    jax.tree.map(np.testing.assert_array_equal, load(converted), load(folder))
    plan = plan_export(converted, tmp_path / "back")
    assert any("q_" in path for path in plan.changed)
    export(plan)
    back = load_file(tmp_path / "back" / _file_of(tmp_path / "back", next(iter(meanings))))
    assert meanings
    for name in [name for name in meanings if name in back]:
        np.testing.assert_array_equal(back[name], meanings[name])
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "back"), load(folder))


def _file_of(folder: Path, name: str) -> str:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return index["weight_map"][name]


def test_a_dtype_is_for_what_is_declared_in_it(int4, tmp_path):
    source, _ = int4
    converted = convert_folder(source, tmp_path / "float32", dtype="float32")
    dtypes = {array.path: array.dtype for _, array in read_manifest(converted).arrays()}
    assert dtypes["embed_tokens"] == dtypes["self_attn.o_proj"] == "F32"
    assert dtypes["moe.gate_proj.weight_packed"] == "I32"
    assert dtypes["moe.gate_proj.weight_scale"] == "BF16"
    jax.tree.map(np.testing.assert_array_equal, load(converted), load(source))


def test_tensors_of_one_array_must_agree_on_a_dtype(tmp_path, golden_dir):
    source = copy_model(PAIR[1], tmp_path / "source")
    assert (source / "model.safetensors").exists()
    tensors = load_file(source / "model.safetensors")
    mixed = source.parent / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_bytes((source / "config.json").read_bytes())
    name = next(name for name in tensors if "layers.0.self_attn.q_proj" in name)
    tensors[name] = tensors[name].astype(np.float32)
    write_shard(mixed / "model.safetensors", tensors)
    # One tensor an array: each layer keeps its own.
    converted = convert_folder(mixed, tmp_path / "converted")
    jax.tree.map(np.testing.assert_array_equal, load(converted), load(mixed))
    expert = copy_model(_float_moe(golden_dir), tmp_path / "expert")
    path = next(p for p in sorted(expert.glob("*.safetensors")) if _expert_of(load_file(p)))
    tensors = load_file(path)
    name = _expert_of(tensors)
    other = np.float32 if tensors[name].dtype != np.float32 else ml_dtypes.bfloat16
    write_shard(path, tensors | {name: tensors[name].astype(other)})
    with pytest.raises(CheckpointError, match=r"several dtypes.*--dtype"):
        plan_conversion(expert, tmp_path / "x")
    plan_conversion(expert, tmp_path / "x", ConvertOptions(dtype="float32"))


def _float_moe(golden_dir: Path) -> Path:
    for folder in sorted((golden_dir / "models").iterdir()):
        config = ModelConfig.from_folder(folder)
        if config.quantization.name == "NONE" and config.moe_layer_ids:
            return folder
    raise AssertionError


def _expert_of(tensors) -> str | None:
    return next((name for name in tensors if ".mlp.experts.1.up_proj" in name), None)


def test_the_first_layers_are_a_model_of_their_own(int4, tmp_path):
    source, _ = int4
    converted = convert_folder(source, tmp_path / "two", layers=2)
    assert ModelConfig.from_folder(converted).num_hidden_layers == 2
    whole, part = load(source), load(converted)
    assert part["input_layernorm"].shape[0] == 2
    np.testing.assert_array_equal(part["input_layernorm"], whole["input_layernorm"][:2])
    np.testing.assert_array_equal(part["lm_head"], whole["lm_head"])
    with pytest.raises(ConfigError, match="--layers 99"):
        plan_conversion(source, tmp_path / "x", ConvertOptions(layers=99))
    with pytest.raises(ConfigError, match="drafter"):
        plan_conversion(PAIR[1], tmp_path / "x", ConvertOptions(layers=1))


@pytest.mark.parametrize("sizes", [(2, 2), (1, 8), (4, 1)])
def test_pieces_end_on_the_borders_of_ranks(sizes, golden_dir, tmp_path):
    tp_size, ep_size = sizes
    source = _divisible(golden_dir, tp_size, ep_size)
    converted = convert_folder(source, tmp_path / "cut", tp_size=tp_size, ep_size=ep_size)
    for _, array in read_manifest(converted).arrays():
        for size, piece, axis in zip(array.shape, array.chunk, array.axes, strict=True):
            cut = {"expert": ep_size, "head": tp_size, "ffn": tp_size, "vocab": tp_size}
            ranks = cut.get(axis, 1)
            assert size % ranks == 0
            assert size // ranks % piece == 0
    jax.tree.map(np.testing.assert_array_equal, load(converted), load(source))


def _divisible(golden_dir: Path, tp_size: int, ep_size: int) -> Path:
    """A golden model that divides, or else the trained pair's target."""
    for folder in [*sorted((golden_dir / "models").iterdir()), PAIR[0]]:
        config = ModelConfig.from_folder(folder)
        widths = {config.vocab_size, config.num_attention_heads, config.intermediate_size}
        widths |= {config.moe_intermediate_size // 32 if config.quantization.name != "NONE" else 0}
        if all(width % tp_size == 0 for width in widths) and config.n_routed_experts % ep_size == 0:
            return folder
    pytest.fail(f"no golden model divides by {tp_size} and {ep_size}")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 5}, ("model.embed_tokens.weight", "'vocab' of 224", "5 equal", "--tp-size")),
        ({"ep_size": 4}, ("model.layers.1.mlp.experts.0.", "'expert' of 10", "4 equal pieces")),
    ],
)
def test_a_cut_that_does_not_divide_names_tensor_and_numbers(sizes, words, int4, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(int4[0], tmp_path / "x", ConvertOptions(**sizes))
    for word in words:
        assert word in str(caught.value)


def test_int4_words_and_scales_are_cut_on_one_group_border_or_not_at_all(golden_dir, tmp_path):
    """Expert width 96: 12 words of 8 and 3 groups of 32; two ranks would cut a group in half."""
    source = int4_golden(golden_dir)
    inner = ModelConfig.from_folder(source).moe_intermediate_size
    assert inner // 8 % 2 == 0
    assert inner // 32 % 2 == 1
    with pytest.raises(CheckpointError, match=r"weight_scale.*'ffn' of 3 does not divide into 2"):
        plan_conversion(source, tmp_path / "x", ConvertOptions(tp_size=2))


def test_nothing_but_headers_is_read_to_plan(int4, tmp_path, monkeypatch):
    from k26jax.checkpoint.reader import Checkpoint

    copy = Checkpoint.copy

    def refuse(self, name, *args):
        if name.endswith(".weight_shape"):
            return copy(self, name)
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "copy", refuse)
    plan = plan_conversion(int4[0], tmp_path / "x")
    assert plan.total_bytes > 0
    with pytest.raises(AssertionError, match="a tensor was read"):
        convert(plan)
