"""Which weights of a checkpoint are quantized, and how, from its `quantization_config`."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from k26jax.config.files import Fields
from k26jax.errors import ConfigError

GROUP_SIZE = 32
FP8_BLOCK = (128, 128)

# Modules that stay in bfloat16 in every published Kimi INT4 checkpoint, one name of each kind.
_UNQUANTIZED = {
    "attention": "model.layers.0.self_attn.o_proj",
    "shared experts": "model.layers.1.mlp.shared_experts.up_proj",
    "dense layers": "model.layers.0.mlp.up_proj",
    "lm_head": "lm_head",
}


class Quantization(Enum):
    """How the weights are stored."""

    NONE = "none"
    INT4_EXPERTS = "int4 group-32 experts (compressed-tensors pack-quantized)"
    FP8_BLOCKS = "fp8 e4m3 with 128x128 block scales"


def parse_quantization(block: dict[str, Any] | None, origin: str) -> Quantization:
    """Returns the storage form that a `quantization_config` object describes.

    Raises: ConfigError for any method, width, group or module set this engine cannot decode.
    """
    if not block:
        return Quantization.NONE
    fields = Fields(block, f"{origin} (quantization_config)")
    method = fields.get("quant_method", str)
    if method == "fp8":
        fields.refuse("fmt", ("e4m3",), "only e4m3 is decoded")
        if fields.ints("weight_block_size") != FP8_BLOCK:
            raise ConfigError(
                f"{fields.origin}: weight_block_size {block['weight_block_size']} is not "
                f"supported, expected {list(FP8_BLOCK)}"
            )
        return Quantization.FP8_BLOCKS
    if method == "compressed-tensors":
        _check_int4(fields)
        return Quantization.INT4_EXPERTS
    raise ConfigError(
        f"{fields.origin}: quant_method {method!r} is not supported; "
        "known: compressed-tensors (pack-quantized INT4), fp8"
    )


def _check_int4(fields: Fields) -> None:
    if fields.get("format", str) != "pack-quantized":
        raise ConfigError(
            f"{fields.origin}: format {fields.data['format']!r} is not supported, "
            "expected 'pack-quantized'"
        )
    fields.refuse("kv_cache_scheme", (), "the cache is not quantized here")
    groups = fields.get("config_groups", dict)
    if len(groups) != 1:
        raise ConfigError(f"{fields.origin}: {len(groups)} config_groups, expected exactly one")
    (name,) = groups
    group = Fields(Fields(groups, f"{fields.origin} config_groups").get(name, dict), fields.origin)
    weights = Fields(group.get("weights", dict), f"{fields.origin} {name}")
    for field, value in (
        ("num_bits", 4),
        ("type", "int"),
        ("symmetric", True),
        ("strategy", "group"),
        ("group_size", GROUP_SIZE),
    ):
        if weights.data.get(field) != value:
            raise ConfigError(
                f"{weights.origin}: {field} = {weights.data.get(field)!r} is not supported, "
                f"expected {value!r}"
            )
    weights.refuse("actorder", (False,), "activation order is not decoded")
    ignored = fields.get("ignore", list, [])
    for kind, module in _UNQUANTIZED.items():
        if not any(_ignores(pattern, module, fields.origin) for pattern in ignored):
            raise ConfigError(
                f"{fields.origin}: 'ignore' does not name the {kind} ({module}), so they would be "
                "INT4; only the routed experts may be"
            )


def _ignores(pattern: Any, module: str, origin: str) -> bool:
    if not isinstance(pattern, str) or not pattern.startswith("re:"):
        return pattern == module
    try:
        return re.match(pattern[3:], module) is not None
    except re.error as error:
        raise ConfigError(f"{origin}: ignore pattern {pattern!r} is invalid: {error}") from error
