"""The published tensors of a target by name and shape, and where each belongs in the parameters."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

from k26jax.checkpoint.int4 import quantize_int4
from k26jax.config import ModelConfig

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)\.(\w+)")


def target_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of all tensors of an unquantized model."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    rank, latent = config.q_lora_rank, config.kv_lora_rank
    query = heads * (nope + rope)
    attention = {
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }
    if rank is None:
        attention["q_proj"] = (query, hidden)
    else:
        attention |= {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,)}
        attention["q_b_proj"] = (query, rank)
    shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        blocks = {f"self_attn.{name}": shape for name, shape in attention.items()}
        blocks |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        if layer < config.first_k_dense_replace:
            blocks |= _mlp("mlp", hidden, config.intermediate_size)
        else:
            blocks["mlp.gate"] = (config.n_routed_experts, hidden)
            inner = config.moe_intermediate_size
            blocks |= _mlp("mlp.shared_experts", hidden, inner * config.n_shared_experts)
            for expert in range(config.n_routed_experts):
                blocks |= _mlp(f"mlp.experts.{expert}", hidden, inner)
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in blocks.items()}
        if layer >= config.first_k_dense_replace:
            shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
    return shapes


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return {f"{prefix}.{name}": shape for name, shape in zip(PROJECTIONS, shapes, strict=True)}


def target_tensors(config: ModelConfig, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random tensors of an unquantized model; the router's bias is float32."""
    rng = np.random.default_rng(11)
    return {
        name: rng.standard_normal(shape).astype(np.float32 if name.endswith("bias") else dtype)
        for name, shape in target_shapes(config).items()
    }


def is_routed(name: str) -> bool:
    return ".mlp.experts." in name


def to_int4(tensors: dict[str, np.ndarray], shape_dtype: Any) -> dict[str, np.ndarray]:
    """The same with the routed experts packed; without weight_shape if its dtype is None."""
    result = {}
    for name, value in tensors.items():
        if not is_routed(name):
            result[name] = value
            continue
        result[f"{name}_packed"], result[f"{name}_scale"] = quantize_int4(value)
        if shape_dtype is not None:
            result[f"{name}_shape"] = np.array(value.shape, shape_dtype)
    return result


def quantize_fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """e4m3 weights, float32 scales a 128x128 block, and the bfloat16 values they stand for."""
    rows, columns = weight.shape
    scales = np.empty((-(-rows // 128), -(-columns // 128)), np.float32)
    values, meaning = np.empty(weight.shape, np.float32), np.empty(weight.shape, np.float32)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        scales[i, j] = np.abs(weight[block]).max() / np.float32(448)
        values[block] = weight[block] / scales[i, j]
        rounded = values[block].astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        meaning[block] = rounded * scales[i, j]
    return values.astype(ml_dtypes.float8_e4m3fn), scales, meaning.astype(ml_dtypes.bfloat16)


def place(name: str, config: ModelConfig, params: dict[str, Any]) -> np.ndarray:
    """The part of the loaded parameters that must hold a tensor, in the tensor's shape."""
    found = _LAYER.fullmatch(name)
    if not found:
        leaf = name.removeprefix("model.").removesuffix(".weight")
        return np.asarray(params[leaf])
    layer, rest = int(found[1]), found[2]
    row = layer - config.first_k_dense_replace
    expert = _EXPERT.fullmatch(rest)
    if expert:
        return np.asarray(params["moe"][expert[2]][expert[3]])[row, int(expert[1])]
    parts = rest.removesuffix(".weight").split(".")
    if parts[0] == "mlp" and row >= 0:
        stack, index = params["moe"], row
        parts = parts[1:] if parts[-1] != "e_score_correction_bias" else parts[-1:]
    else:
        stack, index = params, layer
    for part in parts:
        stack = stack[part]
    value = np.asarray(stack)[index]
    return value.reshape(-1, value.shape[-1]) if parts[-1] == "kv_b_proj" else value
