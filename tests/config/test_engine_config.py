"""EngineConfig: ranges, choices and the algorithm in force."""

from dataclasses import fields
from pathlib import Path

import pytest

from k26jax.config import Algorithm, EngineConfig
from k26jax.errors import RequestError

LIMITS = {
    "speculative_ddtree_budget": (0, 254),
    "speculative_dflash_block_size": (2, 1024),
    "context_length": (2, 1 << 30),
    "max_running_requests": (1, 4096),
    "chunked_prefill_size": (1, 1 << 20),
    "prefix_cache_tokens": (1, 1 << 40),
    "steps_per_dispatch": (1, 1024),
    "seed": (-(1 << 63), (1 << 64) - 1),
}


def refused(*mentions, **options) -> None:
    with pytest.raises(RequestError) as caught:
        EngineConfig(**{"model_path": "model", **options})
    for mention in mentions:
        assert mention in str(caught.value)


def test_needs_a_model():
    refused("model_path", model_path="")
    with pytest.raises(RequestError, match="model_path"):
        EngineConfig()


@pytest.mark.parametrize("name", LIMITS)
def test_integers_at_and_beyond_their_limits(name):
    for value in LIMITS[name]:
        assert getattr(EngineConfig("model", **{name: value}), name) == value
    low, high = LIMITS[name]
    for value in (low - 1, high + 1, "3", 3.0, True):
        refused(name, repr(value), str(low), str(high), **{name: value})


def test_a_switch_is_true_or_false():
    assert EngineConfig("model", enable_prefix_caching=True).enable_prefix_caching
    for value in (1, "true", None):
        refused("enable_prefix_caching", repr(value), enable_prefix_caching=value)


@pytest.mark.parametrize("name", LIMITS)
def test_none_only_where_it_is_the_default(name):
    if getattr(EngineConfig("model"), name) is None:
        assert getattr(EngineConfig("model", **{name: None}), name) is None
    else:
        refused(name, "None", **{name: None})


@pytest.mark.parametrize(
    "name",
    [
        "model_path",
        "speculative_draft_model_path",
        "speculative_algorithm",
        "coordinator_address",
        "compile_cache_dir",
    ],
)
def test_text_is_text_and_not_empty(name):
    """Bug: compile_cache_dir = "" kept programs in the working folder; None was a TypeError."""
    draft = {"speculative_draft_model_path": "drafter"}
    for value in ("", 5, b"path", ["path"], True):
        refused(f"{name} = {value!r}", "expected", **draft | {name: value})
    is_optional = name.startswith("speculative") or name == "coordinator_address"
    if is_optional:
        EngineConfig("model", **{name: None})
    else:
        refused(f"{name} = None", "expected the path of a folder", **{name: None})


def test_every_text_option_is_known_to_that_test():
    known = {item.name for item in fields(EngineConfig) if item.type in ("str", "str | None")}
    assert known == {
        "model_path",
        "speculative_draft_model_path",
        "speculative_algorithm",
        "speculative_ddtree_widths",
        "speculative_cost_table",
        "coordinator_address",
        "compile_cache_dir",
        "dtype",
        "kernels",
    }


AUTO = {"speculative_ddtree_budget": "auto"}


@pytest.mark.parametrize(
    ("text", "running", "expected"),
    [
        ("auto", 1, (1, 2, 4, 8, 16, 32)),
        ("auto", 16, (1, 2, 4, 8, 16)),
        ("auto", 4096, (1, 2)),
        ("16, 4,4", 1, (1, 4, 16)),
        ("1,255", 64, (1, 255)),
    ],
)
def test_widths_of_an_automatic_budget(text, running, expected):
    options = {"speculative_ddtree_widths": text, "max_running_requests": running}
    assert EngineConfig("model", **AUTO, **options).ddtree_widths == expected


def test_options_of_an_automatic_budget_that_cannot_be():
    for text in ("", "1", "0,4", "256", "4;8", "4,,8", "-4", [4, 8], None):
        refused("speculative_ddtree_widths", repr(text), **AUTO, speculative_ddtree_widths=text)
    for name, value in (("speculative_ddtree_widths", "4,8"), ("speculative_cost_table", "a.json")):
        refused(name, value, "speculative_ddtree_budget = 'auto' alone", "16", **{name: value})
        assert getattr(EngineConfig("model", **AUTO, **{name: value}), name) == value
    refused("'Auto'", "from 0 to 254, or 'auto'", speculative_ddtree_budget="Auto")


def test_paths_become_text():
    config = EngineConfig(
        Path("model"),
        speculative_draft_model_path=Path("drafter"),
        compile_cache_dir=Path("cache"),
    )
    assert config == EngineConfig(
        "model", speculative_draft_model_path="drafter", compile_cache_dir="cache"
    )
    refused("speculative_algorithm", speculative_algorithm=Path("DDTREE"))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("dtype", ["auto", "float32", "bfloat16"]),
        ("kernels", ["auto", "reference", "pallas"]),
    ],
)
def test_choices(name, known):
    for value in known:
        assert getattr(EngineConfig("model", **{name: value}), name) == value
    for value in ("float16", "AUTO", None, 1):
        refused(name, repr(value), *known, **{name: value})


@pytest.mark.parametrize(
    ("name", "draft", "expected"),
    [
        (None, None, Algorithm.NONE),
        (None, "drafter", Algorithm.DDTREE),
        ("NONE", "drafter", Algorithm.NONE),
        ("none", None, Algorithm.NONE),
        ("DFLASH", "drafter", Algorithm.DFLASH),
        ("dflash", "drafter", Algorithm.DFLASH),
        ("ddtree", "drafter", Algorithm.DDTREE),
    ],
)
def test_algorithm(name, draft, expected):
    options = {"speculative_algorithm": name, "speculative_draft_model_path": draft}
    assert EngineConfig("model", **options).algorithm is expected


def test_algorithm_that_cannot_run():
    for name in ("DFLASH", "ddtree"):
        refused(name.upper(), "speculative_draft_model_path", speculative_algorithm=name)
    refused("'DDTRE'", "did you mean 'DDTREE'", speculative_algorithm="DDTRE")
    refused("'EAGLE'", "NONE", "DFLASH", "DDTREE", speculative_algorithm="EAGLE")
