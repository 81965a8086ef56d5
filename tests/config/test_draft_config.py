"""DraftConfig: published spellings, masks of layers, default taps, and drafters of other models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from config.published import k25_drafter, k26, without

from k26jax.config import DraftConfig, ModelConfig
from k26jax.config.draft import default_target_layer_ids
from k26jax.errors import ConfigError

REQUIRED = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_target_layers",
    "block_size",
]
FULL, SLIDING = "full_attention", "sliding_attention"


def pytest_generate_tests(metafunc):
    if "golden_drafter" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--golden-dir"))
        found = sorted(path.parent for path in folder.glob("drafter*/config.json"))
        metafunc.parametrize("golden_drafter", found, ids=[path.name for path in found])


def refused(data, *mentions) -> None:
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(data, "the-file.json")
    for mention in ("the-file.json", *mentions):
        assert mention in str(caught.value)


def test_golden_folder(golden_drafter):
    config = DraftConfig.from_folder(golden_drafter)
    data = json.loads((golden_drafter / "config.json").read_text())
    for name in REQUIRED:
        assert getattr(config, name) == data[name], name
    assert config.target_layer_ids == tuple(data["dflash_config"]["target_layer_ids"])
    assert config.mask_token_id == data["dflash_config"]["mask_token_id"]
    assert config.rms_norm_eps == data["rms_norm_eps"]
    assert config.depth == data["block_size"] - 1
    assert config.windows == (None,) * data["num_hidden_layers"]
    assert config.causal == (False,) * data["num_hidden_layers"]


def test_golden_spellings_agree(golden_drafter):
    spellings = sorted(golden_drafter.glob("config*.json"))
    configs = [DraftConfig.from_dict(json.loads(path.read_text())) for path in spellings]
    assert configs.count(configs[0]) == len(spellings)


def test_k25_drafter():
    config = DraftConfig.from_dict(k25_drafter())
    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert (config.mask_token_id, config.block_size, config.depth) == (163838, 8, 7)
    assert config.depth_of(16) == 15
    config.check_target(ModelConfig.from_dict(k26()))


@pytest.mark.parametrize("name", [*REQUIRED, "rms_norm_eps", "rope_theta"])
def test_missing_field_is_named(name):
    refused(without(k25_drafter(), name), repr(name))


def test_missing_mask_token_is_named():
    refused(k25_drafter({"mask_token_id": None}), "'mask_token_id'")
    refused(without(k25_drafter(), "dflash_config"), "'mask_token_id'")


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", ["8", 8.0, True, 0, -1])
def test_integer_of_another_type_or_below_one(name, value):
    refused(k25_drafter(**{name: value}), repr(name), str(value))


@pytest.mark.parametrize(
    "architectures",
    [["DFlash2DraftModel"], ["Qwen3ForCausalLM"], [], None, ["DFlashDraftModel", "Other"], "x"],
)
def test_other_drafters_are_refused_by_name(architectures):
    refused(k25_drafter(architectures=architectures), "architectures", str(architectures or []))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("input_embedding_scale", 84.6),
        ("output_multiplier", 0.5),
        ("final_logit_softcapping", 30.0),
        ("num_key_value_heads", 7),
        ("head_dim", 127),
        ("block_size", 1),
    ],
)
def test_values_that_cannot_run(field, value):
    refused(k25_drafter(**{field: value}), str(value))


@pytest.mark.parametrize(
    ("dflash", "mention"),
    [
        ({"mask_token_id": 163840}, "mask_token_id 163840"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"mask_token_id": "x"}, "mask_token_id"),
        ({"target_layer_ids": [1, 61]}, "layer 61"),
        ({"target_layer_ids": [-1]}, "layer -1"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [1.0]}, "target_layer_ids"),
        ({"target_layer_ids": 3}, "target_layer_ids"),
        ({"causal": 1}, "causal"),
        ({"use_swa": "yes"}, "use_swa"),
        ({"use_swa": True}, "sliding_window"),
    ],
)
def test_dflash_values_that_cannot_run(dflash, mention):
    refused(k25_drafter(dflash), mention)


def test_neutral_values_of_newer_fields():
    neutral = k25_drafter(
        input_embedding_scale=1.0, output_multiplier=1, final_logit_softcapping=None
    )
    assert DraftConfig.from_dict(neutral) == DraftConfig.from_dict(k25_drafter())


def test_fields_inside_dflash_config():
    moved = without(k25_drafter({"block_size": 8}), "block_size")
    assert DraftConfig.from_dict(moved) == DraftConfig.from_dict(k25_drafter())
    flat = without(k25_drafter(), "dflash_config") | {
        "target_layer_ids": [1, 12, 24, 35, 47, 58],
        "mask_token_id": 163838,
    }
    assert DraftConfig.from_dict(flat) == DraftConfig.from_dict(k25_drafter())


def test_sample_from_anchor_drafts_the_whole_block():
    config = DraftConfig.from_dict(k25_drafter({"sample_from_anchor": True}))
    assert (config.depth, config.depth_of(3)) == (8, 3)
    assert DraftConfig.from_dict(k25_drafter(sample_from_anchor=True)) == config
    single = DraftConfig.from_dict(k25_drafter(sample_from_anchor=True, block_size=1))
    assert single.depth == 1


@pytest.mark.parametrize(
    ("n_target", "n_draft", "expected"),
    [
        (61, 6, (1, 12, 24, 35, 47, 58)),  # the published drafters of Kimi K2.5 and K2.6
        (36, 5, (1, 9, 17, 25, 33)),  # Qwen3-8B-DFlash-b16
        (64, 5, (1, 16, 31, 46, 61)),  # Qwen3.6-27B-DFlash
        (36, 1, (18,)),
        (61, 1, (30,)),
        # Halves go to the even neighbour: 1 + 1 * 3 / 2 = 2.5 and 1 + 3 * 3 / 2 = 5.5.
        (10, 5, (1, 2, 4, 6, 7)),
    ],
)
def test_default_target_layers(n_target, n_draft, expected):
    assert default_target_layer_ids(n_target, n_draft) == expected
    data = k25_drafter(
        {"target_layer_ids": None},
        num_target_layers=n_target,
        num_hidden_layers=n_draft,
        layer_types=[FULL] * n_draft,
    )
    assert DraftConfig.from_dict(data).target_layer_ids == expected


MIXED = [SLIDING, FULL, SLIDING, FULL, FULL, SLIDING]


@pytest.mark.parametrize(
    ("changes", "dflash", "windows", "causal"),
    [
        ({}, {}, [None] * 6, [False] * 6),
        ({"sliding_window": 2048}, {}, [None] * 6, [False] * 6),
        (
            {"layer_types": MIXED, "sliding_window": 9},
            {},
            [9, None, 9, None, None, 9],
            [True, False, True, False, False, True],
        ),
        (
            {"layer_types": MIXED, "sliding_window": 9, "is_causal": False},
            {},
            [9, None, 9, None, None, 9],
            [False] * 6,
        ),
        (
            {"layer_types": MIXED, "sliding_window": 9, "is_causal": False},
            {"causal": True},
            [9, None, 9, None, None, 9],
            [True] * 6,
        ),
        ({"is_causal": True}, {}, [None] * 6, [True] * 6),
        ({"sliding_window": 9}, {"use_swa": True}, [9] * 6, [False] * 6),
        ({}, {"use_swa": True, "swa_window_size": 5}, [5] * 6, [False] * 6),
        ({"sliding_window": 9}, {"use_swa": True, "swa_window_size": 5}, [5] * 6, [False] * 6),
        (
            {"layer_types": MIXED, "sliding_window": 9},
            {"use_swa": True, "causal": True},
            [9] * 6,
            [True] * 6,
        ),
        ({}, {"use_swa": False, "swa_window_size": 5}, [None] * 6, [False] * 6),
    ],
)
def test_windows_and_causality(changes, dflash, windows, causal):
    config = DraftConfig.from_dict(k25_drafter(dflash, **changes))
    assert config.windows == tuple(windows)
    assert config.causal == tuple(causal)


@pytest.mark.parametrize(
    ("changes", "mention"),
    [
        ({"layer_types": [FULL] * 5}, "layer_types"),
        ({"layer_types": [FULL] * 5 + ["linear_attention"]}, "linear_attention"),
        ({"layer_types": [FULL] * 5 + [[1]]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": MIXED}, "sliding_window"),
        ({"layer_types": MIXED, "sliding_window": 0}, "sliding_window"),
        ({"sliding_window": "9"}, "sliding_window"),
        ({"is_causal": "no"}, "is_causal"),
    ],
)
def test_layer_kinds_that_cannot_run(changes, mention):
    refused(k25_drafter(**changes), mention)


def test_sliding_layers_must_be_named():
    silent = without(k25_drafter(use_sliding_window=True, sliding_window=9), "layer_types")
    refused(silent, "use_sliding_window", "layer_types")
    config = DraftConfig.from_dict(silent | {"use_sliding_window": False})
    assert config.windows == (None,) * 6


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_target_layers"])
def test_drafter_of_another_target(field):
    target = ModelConfig.from_dict(k26())
    config = DraftConfig.from_dict(k25_drafter())
    other = replace(config, **{field: getattr(config, field) + 64})
    with pytest.raises(ConfigError) as caught:
        other.check_target(target, "the-drafter")
    for mention in ("the-drafter", field, str(getattr(other, field)), str(getattr(config, field))):
        assert mention in str(caught.value)


def test_dtypes_of_other_drafters():
    for name in ("dtype", "torch_dtype"):
        DraftConfig.from_dict(k25_drafter(**{name: "bfloat16"}))
        refused(k25_drafter(**{name: "float9"}), f"{name} = 'float9'", "bfloat16")
