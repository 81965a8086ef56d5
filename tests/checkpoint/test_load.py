"""load_params: every published tensor in its place, and every misfit refused by name."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint.published_tensors import is_routed, place, quantize_fp8, target_tensors, to_int4
from fixtures.pairs import tiny_configs
from fixtures.shards import write_shard
from model.drafter_oracle import generated_weights

from k26jax.checkpoint.load import load_params, plan_load
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.config import ModelConfig, Quantization
from k26jax.errors import CheckpointError
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import abstract, bind
from k26jax.model.target import Target

INT4_MODEL, DRAFTER = tiny_configs()
MODEL = replace(INT4_MODEL, quantization=Quantization.NONE, hidden_size=160, intermediate_size=200)
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def pytest_generate_tests(metafunc):
    if "float_folder" in metafunc.fixturenames:
        models = Path(metafunc.config.getoption("--golden-dir")) / "models"
        found = [path.parent for path in sorted(models.glob("*/config.json"))]
        found = [f for f in found if ModelConfig.from_folder(f).quantization is Quantization.NONE]
        metafunc.parametrize("float_folder", found, ids=[path.name for path in found])


def module_of(config: ModelConfig, dtype=jnp.float32) -> Target:
    return abstract(lambda rngs: Target(config, dtype=dtype, rngs=rngs))


def load(folder: Path, tensors, module, **options):
    write_shard(folder / "model.safetensors", tensors)
    layers = options.pop("num_hidden_layers", None)
    with open_checkpoint(folder, num_hidden_layers=layers) as checkpoint:
        return load_params(checkpoint, module, **options)


def refused(folder: Path, tensors, module, *mentions) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder, tensors, module)
    for mention in (str(folder.name), *mentions):
        assert mention in str(caught.value)


def tensor_count(params) -> int:
    return sum(np.asarray(leaf).size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("q_lora_rank", [16, None])
def test_every_tensor_is_in_its_place(tmp_path, stored, dtype, q_lora_rank):
    config = replace(MODEL, q_lora_rank=q_lora_rank)
    tensors = target_tensors(config, stored)
    params = load(tmp_path, tensors, module_of(config, dtype))
    for name, value in tensors.items():
        found = place(name, config, params)
        expected = value.astype(np.float32 if name.endswith("bias") else dtype)
        assert found.dtype == expected.dtype, name
        np.testing.assert_array_equal(found, expected, err_msg=name)
    assert tensor_count(params) == sum(value.size for value in tensors.values())


@pytest.mark.parametrize("shape_dtype", [np.int32, np.int64, None])
def test_int4_words_and_scales_stay(tmp_path, shape_dtype):
    tensors = to_int4(target_tensors(INT4_MODEL, np.float32), shape_dtype)
    params = load(tmp_path, tensors, module_of(INT4_MODEL))
    kept = {name: value for name, value in tensors.items() if not name.endswith("_shape")}
    for name, value in kept.items():
        found = place(name, INT4_MODEL, params)
        assert found.dtype == value.dtype, name
        np.testing.assert_array_equal(found, value, err_msg=name)
    assert tensor_count(params) == sum(value.size for value in kept.values())


@pytest.mark.parametrize(
    ("value", "mention"),
    [
        (np.array([32, 64], np.int32), "(32, 64)"),
        (np.array([32, 28], np.int32), "28"),
        (np.array([32, 32, 1], np.int32), "2 numbers"),
        (np.array([32, 32], np.float32), "float32"),
        (np.array([-32, 32], np.int64), "-32"),
    ],
)
def test_int4_shape_that_does_not_fit(tmp_path, value, mention):
    tensors = to_int4(target_tensors(INT4_MODEL, np.float32), np.int32)
    tensors[f"{EXPERT}_shape"] = value
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, tensors, module_of(INT4_MODEL))
    assert EXPERT in str(caught.value)
    assert mention in str(caught.value)


@pytest.mark.parametrize("part", ["packed", "scale"])
def test_int4_part_missing_or_of_another_kind(tmp_path, part):
    tensors = to_int4(target_tensors(INT4_MODEL, np.float32), None)
    name = f"{EXPERT}_{part}"
    value = tensors.pop(name)
    refused(tmp_path, tensors, module_of(INT4_MODEL), "missing", name)
    tensors[name] = value[:, :-1] if value.shape[-1] > 1 else value[:-1]
    refused(tmp_path, tensors, module_of(INT4_MODEL), name, "shape")
    tensors[name] = value.astype(np.int64)
    refused(tmp_path, tensors, module_of(INT4_MODEL), name, "I64")


def test_int4_checkpoint_of_a_float_model_and_the_reverse(tmp_path):
    tensors = target_tensors(INT4_MODEL, np.float32)
    float_model = replace(INT4_MODEL, quantization=Quantization.NONE)
    refused(tmp_path, tensors, module_of(INT4_MODEL), "proj.weight_packed", "not of this")
    packed = to_int4(tensors, np.int32)
    refused(tmp_path, packed, module_of(float_model), "missing", "weight_packed")


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.2.self_attn.kv_b_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.shared_experts.gate_proj.weight",
        EXPERT,
    ],
)
def test_one_tensor_missing_or_of_another_kind(tmp_path, name):
    module = module_of(MODEL)
    tensors = target_tensors(MODEL)
    value = tensors.pop(name)
    refused(tmp_path, tensors, module, "1 tensors are missing", name)
    tensors[name] = value[..., :-1]
    refused(tmp_path, tensors, module, name, "shape", str([*value.shape[:-1], value.shape[-1] - 1]))
    tensors[name] = value[..., None]
    refused(tmp_path, tensors, module, name, "shape", str(list(value.shape)))
    tensors[name] = value.astype(np.int32)
    refused(tmp_path, tensors, module, name, "dtype I32", "BF16")
    tensors[name] = value.astype(np.float64)
    refused(tmp_path, tensors, module, name, "dtype F64")


def test_leftover_tensors(tmp_path):
    tensors = target_tensors(MODEL)
    extra = "model.layers.1.self_attn.o_proj.bias"
    tensors[extra] = np.zeros(3, np.float32)
    refused(tmp_path, tensors, module_of(MODEL), "1 tensors are not of this model", extra)
    more = {f"model.odd.{i}": np.zeros(1, np.float32) for i in range(5)}
    refused(tmp_path, tensors | more, module_of(MODEL), "6 tensors", "...")


def test_missing_and_leftover_in_one_message(tmp_path):
    tensors = target_tensors(MODEL)
    tensors["model.layers.1.self_attn.o_project.weight"] = tensors.pop(O_PROJ)
    refused(tmp_path, tensors, module_of(MODEL), O_PROJ, "o_project", "config.json")


def test_everything_is_checked_before_a_weight_is_read(tmp_path, monkeypatch):
    tensors = to_int4(target_tensors(INT4_MODEL, np.float32), np.int64)
    write_shard(tmp_path / "model.safetensors", tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        copy = checkpoint.copy

        def only_shapes(name: str) -> np.ndarray:
            assert name.endswith("_shape")
            return copy(name)

        monkeypatch.setattr(checkpoint, "copy", only_shapes)
        plan = plan_load(checkpoint, module_of(INT4_MODEL))
        found = {name for _, names in plan.values() for _, name in names}
    assert found == {name for name in tensors if not name.endswith("_shape")}


def test_progress_counts_the_bytes_read(tmp_path):
    tensors = target_tensors(MODEL, ml_dtypes.bfloat16)
    seen: list[int] = []
    load(tmp_path, tensors, module_of(MODEL), progress=seen.append)
    assert sorted(seen) == sorted(value.nbytes for value in tensors.values())


def test_fp8_blocks(tmp_path):
    """Weights of several blocks, cut short on both axes, mean their bfloat16 products."""
    tensors, meanings = {}, {}
    for name, value in target_tensors(MODEL).items():
        if value.ndim == 2 and ("proj" in name):
            tensors[name], tensors[f"{name}_scale_inv"], meanings[name] = quantize_fp8(value)
        else:
            tensors[name] = meanings[name] = value
    assert max(x.size for name, x in tensors.items() if name.endswith("scale_inv")) >= 4
    params = load(tmp_path, tensors, module_of(MODEL))
    for name, value in meanings.items():
        np.testing.assert_array_equal(
            place(name, MODEL, params), value.astype(np.float32), err_msg=name
        )


@pytest.mark.parametrize("change", ["missing", "transposed", "short", "bfloat16"])
def test_fp8_scale_that_does_not_fit(tmp_path, change):
    tensors = target_tensors(MODEL)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name], scale, _ = quantize_fp8(np.repeat(tensors[name], 1, axis=0))
    assert scale.shape == (2, 2)
    changed = {
        "transposed": np.concatenate([scale, scale]).T,
        "short": scale[:1],
        "bfloat16": scale.astype(ml_dtypes.bfloat16),
    }
    if change != "missing":
        tensors[f"{name}_scale_inv"] = changed[change]
    with pytest.raises(CheckpointError, match=f"{name}_scale_inv"):
        load(tmp_path, tensors, module_of(MODEL))


def test_fp8_copy_of_a_golden_model(tmp_path, float_folder):
    """A golden folder with its products quantized loads as the dequantized one."""
    config = ModelConfig.from_folder(float_folder)
    quantized, meanings = {}, {}
    with open_checkpoint(float_folder, num_hidden_layers=config.num_hidden_layers) as checkpoint:
        for name in checkpoint.names():
            value = np.array(checkpoint.read(name), np.float32)
            if is_routed(name) or ("self_attn" in name and value.ndim == 2):
                quantized[name], quantized[f"{name}_scale_inv"], meanings[name] = quantize_fp8(
                    value
                )
            else:
                quantized[name] = meanings[name] = value
    (tmp_path / "fp8").mkdir()
    module = module_of(config)
    found = load(tmp_path / "fp8", quantized, module)
    expected = load(tmp_path, meanings, module)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert any(name.endswith("scale_inv") for name in quantized)


def test_prediction_layer_and_frequencies_are_skipped(tmp_path):
    tensors = target_tensors(MODEL)
    n = MODEL.num_hidden_layers
    stale = np.zeros(2, ml_dtypes.bfloat16)
    extra = {
        f"model.layers.{n}.eh_proj.weight": stale,
        f"model.layers.{n}.self_attn.o_proj.weight": stale,
        "model.layers.0.self_attn.rotary_emb.inv_freq": stale,
    }
    params = load(tmp_path, tensors | extra, module_of(MODEL), num_hidden_layers=n)
    np.testing.assert_array_equal(place(O_PROJ, MODEL, params), tensors[O_PROJ])
    refused(tmp_path, tensors | extra, module_of(MODEL), f"model.layers.{n}.eh_proj.weight")


def test_prefix_and_vision_of_the_nested_models(tmp_path):
    tensors = target_tensors(MODEL)
    nested = {f"language_model.{name}": value for name, value in tensors.items()}
    nested["vision_tower.patch_embed.proj.weight"] = np.zeros((2, 2), np.float32)
    nested["mm_projector.proj.0.bias"] = np.zeros(2, np.float32)
    (tmp_path / "nested").mkdir()
    found = load(tmp_path / "nested", nested, module_of(MODEL))
    expected = load(tmp_path, tensors, module_of(MODEL))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_tied_embeddings(tmp_path):
    """The head is the table, whether or not the file repeats it."""
    config = replace(MODEL, tie_word_embeddings=True)
    module = module_of(config)
    tensors = target_tensors(config)
    repeated = load(tmp_path, tensors, module)
    head = tensors.pop("lm_head.weight")
    params = load(tmp_path, tensors, module)
    jax.tree.map(np.testing.assert_array_equal, params, repeated)
    assert "lm_head" not in params
    table = tensors["model.embed_tokens.weight"]
    hidden = np.random.default_rng(0).standard_normal((3, config.hidden_size)).astype(np.float32)
    logits = bind(module, params).logits(jnp.asarray(hidden))
    np.testing.assert_allclose(logits, hidden @ table.T, rtol=1e-4, atol=1e-4)
    assert np.abs(hidden @ head.T - hidden @ table.T).max() > 1
    # Nothing but "model." names is left, so a missing one must not be looked for as "model.model.".
    del tensors[O_PROJ]
    refused(tmp_path, tensors, module, f"first {O_PROJ};")


def test_untied_model_needs_its_head(tmp_path):
    tensors = target_tensors(MODEL)
    del tensors["lm_head.weight"]
    refused(tmp_path, tensors, module_of(MODEL), "first lm_head.weight")


def test_drafter_with_and_without_prefix(tmp_path):
    module = abstract(lambda rngs: Drafter(DRAFTER, dtype=jnp.float32, rngs=rngs))
    tensors = generated_weights(DRAFTER)
    (tmp_path / "prefixed").mkdir()
    prefixed = {f"model.{name}": value for name, value in tensors.items()}
    found = load(tmp_path / "prefixed", prefixed, module)
    expected = load(tmp_path, tensors, module)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for layer in range(DRAFTER.num_hidden_layers):
        for path, leaf in {
            "self_attn.q_norm": expected["q_norm"],
            "self_attn.k_proj": expected["k_proj"],
            "input_layernorm": expected["input_layernorm"],
            "mlp.down_proj": expected["mlp"]["down_proj"],
        }.items():
            np.testing.assert_array_equal(leaf[layer], tensors[f"layers.{layer}.{path}.weight"])
    np.testing.assert_array_equal(expected["fc"], tensors["fc.weight"])
    assert tensor_count(expected) == sum(value.size for value in tensors.values())


def test_drafter_misfits(tmp_path):
    module = abstract(lambda rngs: Drafter(DRAFTER, dtype=jnp.float32, rngs=rngs))
    tensors = generated_weights(DRAFTER)
    head = np.zeros((DRAFTER.vocab_size, DRAFTER.hidden_size), np.float32)
    refused(tmp_path, tensors | {"lm_head.weight": head}, module, "not of this", "lm_head.weight")
    mixed = {f"model.{name}": value for name, value in tensors.items()}
    mixed["fc.weight"] = mixed.pop("model.fc.weight")
    refused(tmp_path, mixed, module, "first hidden_norm.weight", "first model.hidden_norm.weight")
    short = tensors | {"fc.weight": tensors["fc.weight"][:, :-1]}
    refused(tmp_path, short, module, "fc.weight", "shape")
    del tensors["layers.1.self_attn.q_norm.weight"]
    refused(tmp_path, tensors, module, "layers.1.self_attn.q_norm.weight")
