"""ModelConfig: what the published files say, nothing guessed, and every refusal by name."""

import json
from pathlib import Path

import pytest
from config.published import (
    THINKING_IGNORE,
    fp8_block,
    glm_47_flash,
    int4_block,
    k2_instruct,
    k26,
    k26_text,
    without,
)

from k26jax.config import ModelConfig, Quantization
from k26jax.errors import ConfigError

INTEGERS = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "max_position_embeddings",
]
FLOATS = ["routed_scaling_factor", "rms_norm_eps", "rope_theta"]
REQUIRED = [*INTEGERS, *FLOATS, "model_type", "q_lora_rank", "norm_topk_prob"]
GROUPS = ["n_group", "topk_group"]


def pytest_generate_tests(metafunc):
    if "golden_model" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--golden-dir")) / "models"
        found = sorted(path.parent for path in folder.glob("*/config.json"))
        metafunc.parametrize("golden_model", found, ids=[path.name for path in found])


def refused(data, *mentions) -> str:
    """The message with which a config is refused, which must hold all mentions."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data, "the-file.json")
    message = str(caught.value)
    for mention in ("the-file.json", *mentions):
        assert mention in message
    return message


def test_golden_folder(golden_model):
    config = ModelConfig.from_folder(golden_model)
    data = json.loads((golden_model / "config.json").read_text())
    text = data.get("text_config", data)
    same = {*INTEGERS, *FLOATS, "q_lora_rank", "n_shared_experts", "moe_layer_freq"} | {
        "norm_topk_prob",
        "scoring_func",
        "topk_method",
        "tie_word_embeddings",
    }
    for name in same - {"rope_theta"}:
        assert getattr(config, name) == text[name], name
    assert config.rope.rope_theta == text["rope_theta"]
    scaling = text["rope_scaling"] or {"factor": 1.0}
    for name in set(scaling) - {"type"}:
        assert getattr(config.rope, name) == scaling[name], name
    assert config.eos_token_ids == (data["eos_token_id"],)
    quantized = "quantization_config" in text
    assert config.quantization is (Quantization.INT4_EXPERTS if quantized else Quantization.NONE)


def test_golden_folder_needs_every_field(golden_model):
    data = json.loads((golden_model / "config.json").read_text())
    text = data.get("text_config", data)
    # A greedy router knows no groups.
    names = set(REQUIRED) - (set(GROUPS) if text["topk_method"] == "greedy" else set())
    for name in names:
        refused(without(text, name), name)


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_named(name):
    refused(k26() | {"text_config": without(k26_text(), name)}, repr(name), "text_config")


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", ["64", 64.0, True, [64]])
def test_integer_of_another_type(name, value):
    refused(k26(**{name: value}), repr(name), repr(value), "expected int")


@pytest.mark.parametrize("name", sorted(set(INTEGERS) - {"first_k_dense_replace"}))
@pytest.mark.parametrize("value", [0, -3])
def test_integer_below_one(name, value):
    refused(k26(**{name: value}), repr(name), str(value), "at least 1")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", ["1", True, float("nan"), float("inf"), [1.0]])
def test_number_of_another_type(name, value):
    refused(k26(**{name: value}), repr(name), repr(value), "expected float")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_topk_prob", 1),
        ("tie_word_embeddings", "no"),
        ("scoring_func", 3),
        ("topk_method", ["noaux_tc"]),
        ("n_shared_experts", 1.0),
        ("moe_layer_freq", 0),
        ("moe_layer_freq", [1, 1]),
        ("q_lora_rank", 0),
        ("q_lora_rank", 1536.0),
        ("quantization_config", "int4"),
        ("quantization_config", [1]),
        ("eos_token_id", "2"),
        ("eos_token_id", [1, True]),
        ("rope_scaling", "yarn"),
        ("rope_interleave", 1),
    ],
)
def test_other_fields_of_another_type(field, value):
    message = refused(k26(**{field: value}))
    assert field in message or "rope block" in message
    assert repr(value) in message


def test_integers_are_accepted_as_numbers():
    assert ModelConfig.from_dict(k26(rope_theta=50000)).rope.rope_theta == 50000.0


def test_k26():
    config = ModelConfig.from_dict(k26())
    assert config.quantization is Quantization.INT4_EXPERTS
    assert config.eos_token_ids == (163586,)
    assert config.moe_layer_ids == tuple(range(1, 61))
    assert config.dense_layer_ids == (0,)
    assert config.has_selection_bias
    assert config.latent_norm_eps == 1e-6
    assert (config.hidden_size, config.num_hidden_layers) == (7168, 61)


def test_nested_and_flat_agree():
    assert ModelConfig.from_dict(k26()) == ModelConfig.from_dict(k26_text())


def test_quantization_beside_the_text_config():
    inside, outside = k26(), k26(quantization_config=None)
    assert ModelConfig.from_dict(outside).quantization is Quantization.NONE
    outside["quantization_config"] = int4_block()
    assert ModelConfig.from_dict(outside) == ModelConfig.from_dict(inside)
    del outside["text_config"]["quantization_config"]
    assert ModelConfig.from_dict(outside) == ModelConfig.from_dict(inside)


def test_nested_without_text_config():
    refused(without(k26(), "text_config"), "text_config")


def test_stop_ids_of_all_three_places(tmp_path):
    data = k26(eos_token_id=[163585, 163586])
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (163586, 163585)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [163585, 7]}')
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (163586, 163585, 7)
    for outside in (163840, -1):
        text = json.dumps({"eos_token_id": [163585, outside]})
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"generation_config\.json.*{outside}.*vocabulary"):
            ModelConfig.from_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json.*eos_token_id"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "mention"),
    [(None, "does not exist"), ("[1]", "a JSON list"), ("{", "not readable JSON")],
)
def test_unreadable_file(tmp_path, content, mention):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert "config.json" in str(caught.value)
    assert mention in str(caught.value)


@pytest.mark.parametrize(
    "model_type",
    ["deepseek_v32", "kimi_linear", "kimi_k3", "glm_moe_dsa", "llama", "qwen3", "deepseek_v4", ""],
)
def test_other_architectures_are_refused_by_name(model_type):
    refused(k26_text(model_type=model_type), repr(model_type), "not supported")
    refused(k26(model_type=model_type), repr(model_type), "not supported", "text_config")


@pytest.mark.parametrize("value", [None, 7, ["kimi_k2"]])
def test_model_type_of_another_type(value):
    refused(k26_text(model_type=value), "model_type")


@pytest.mark.parametrize(
    ("field", "value"),
    [("index_topk", 2048), ("index_n_heads", 64), ("linear_attn_config", {"kda_layers": [1]})],
)
def test_sparse_and_linear_attention_is_refused_by_field(field, value):
    refused(k26(**{field: value}), repr(field), "attention")
    assert ModelConfig.from_dict(k26(**{field: None})) == ModelConfig.from_dict(k26())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("scoring_func", "tanh"),
        ("topk_method", "random"),
        ("n_group", 5),
        ("topk_group", 2),
        ("num_experts_per_tok", 385),
        ("qk_rope_head_dim", 63),
        ("first_k_dense_replace", 62),
        ("first_k_dense_replace", -1),
        ("eos_token_id", 163840),
        ("eos_token_id", -1),
        ("hidden_size", 7170),
        ("moe_intermediate_size", 2049),
    ],
)
def test_values_that_cannot_run(field, value):
    refused(k26(**{field: value}), field, str(value))


def test_expert_choice_within_the_kept_groups():
    grouped = {"n_group": 48, "topk_group": 1, "num_experts_per_tok": 8}
    assert ModelConfig.from_dict(k26(**grouped)).n_group == 48
    refused(k26(**grouped | {"num_experts_per_tok": 9}), "num_experts_per_tok", "8 experts")


def test_router_defaults_follow_the_model_type():
    silent = without(k26_text(), "scoring_func", "topk_method")
    config = ModelConfig.from_dict(silent)
    assert (config.scoring_func, config.topk_method) == ("sigmoid", "noaux_tc")
    silent["model_type"] = "deepseek_v2"
    config = ModelConfig.from_dict(silent)
    assert (config.scoring_func, config.topk_method) == ("softmax", "greedy")
    assert not config.has_selection_bias


def test_glm():
    config = ModelConfig.from_dict(glm_47_flash())
    assert config.first_k_dense_replace == 1
    assert config.rope.inv_freq(64)[1] == pytest.approx(1e6 ** (-2 / 64), rel=3e-7)
    assert config.softmax_scale == 256**-0.5
    assert len(config.eos_token_ids) == 3
    refused(glm_47_flash(first_k_dense_replace=2), "first_k_dense_replace = 2", "mlp_layer_types")
    refused(glm_47_flash(mlp_layer_types=["dense"] * 46), "mlp_layer_types")
    mixed = ["sparse", "dense"] + ["sparse"] * 45
    refused(glm_47_flash(mlp_layer_types=mixed), "mlp_layer_types")


@pytest.mark.parametrize("ignore", [None, THINKING_IGNORE])
def test_int4_of_both_published_ignore_lists(ignore):
    config = ModelConfig.from_dict(k26(quantization_config=int4_block(ignore)))
    assert config.quantization is Quantization.INT4_EXPERTS


@pytest.mark.parametrize("left_out", [0, 1, 2, 3])
def test_int4_beyond_the_experts(left_out):
    block = int4_block()
    pattern = block["ignore"][left_out]
    block["ignore"] = [item for item in block["ignore"] if item != pattern]
    mention = ["attention", "shared experts", "dense layers", "lm_head"][left_out]
    refused(k26(quantization_config=block), "ignore", mention)
    refused(k26(quantization_config=without(block, "ignore")), "ignore")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_bits", 8),
        ("type", "float"),
        ("symmetric", False),
        ("strategy", "channel"),
        ("group_size", 128),
        ("group_size", None),
        ("actorder", "group"),
    ],
)
def test_other_int4_schemes(field, value):
    refused(k26(quantization_config=int4_block(**{field: value})), field, repr(value))


@pytest.mark.parametrize(
    ("changes", "mention"),
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "modelopt"}, "'modelopt'"),
        ({"quant_method": None}, "quant_method"),
        ({"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        ({"format": None}, "format"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
        ({"config_groups": {"a": {}}}, "weights"),
        ({"config_groups": {"a": "b"}}, "'b'"),
        ({"config_groups": {"a": {"weights": 4}}}, "weights"),
        ({"ignore": ["re:("]}, "'re:('"),
        ({"ignore": [3]}, "attention"),
    ],
)
def test_other_quantization(changes, mention):
    refused(k26(quantization_config={**int4_block(), **changes}), "quantization_config", mention)


def test_fp8():
    assert ModelConfig.from_dict(k2_instruct()).quantization is Quantization.FP8_BLOCKS
    for changes, mention in (
        ({"weight_block_size": [64, 128]}, "[64, 128]"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"weight_block_size": 128}, "weight_block_size"),
        ({"fmt": "e5m2"}, "'e5m2'"),
    ):
        refused(k26_text(quantization_config=fp8_block(**changes)), mention)


def test_scheduled_moe_layers():
    config = ModelConfig.from_dict(
        k26(num_hidden_layers=8, first_k_dense_replace=3, moe_layer_freq=2)
    )
    assert config.moe_layer_ids == (4, 6)
    assert config.dense_layer_ids == (0, 1, 2, 3, 5, 7)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtypes_of_other_models(name):
    """At the top and in text_config; the name is checked although the tensors have their own."""
    for value in ("bfloat16", "float16", "float32", None):
        ModelConfig.from_dict(k26(**{name: value}) | {name: value})
        ModelConfig.from_dict(k2_instruct(**{name: value}))
    for value in ("float9", "", 5, ["bfloat16"]):
        message = f"{name} = {value!r}"
        refused(k26() | {name: value}, message, "bfloat16, float16, float32")
        refused(k26(**{name: value}), "text_config", message)
        refused(k2_instruct(**{name: value}), message)


def test_an_unfinished_conversion_is_named(tmp_path):
    folder = tmp_path / "k26.partial"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"k26\.partial is an unfinished conversion.*--resume"):
        ModelConfig.from_folder(folder)
