"""The meaningful fields of published `config.json` files, as plain dictionaries."""

from __future__ import annotations

import copy
from typing import Any

Json = dict[str, Any]

IGNORE = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:vision_tower.*",
    "re:mm_projector.*",
]
THINKING_IGNORE = ["lm_head", *IGNORE[:3]]


def int4_block(ignore: list[str] | None = None, **weights: Any) -> Json:
    """The quantization_config of K2-Thinking to K2.7-Code, with changes to its weights."""
    scheme = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
        "observer_kwargs": {},
    }  # fmt: skip
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "weights": {**scheme, **weights}}},
        "ignore": IGNORE if ignore is None else ignore,
    }


def fp8_block(**changes: Any) -> Json:
    """The quantization_config of DeepSeek-V3 and K2-Instruct."""
    block = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    return {**block, "weight_block_size": [128, 128], **changes}


def yarn(**changes: Any) -> Json:
    """The rope_scaling of Kimi K2.5 and K2.6, target and drafter alike."""
    block = {
        "type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    return {**block, **changes}


def k26_text(**changes: Any) -> Json:
    """Kimi K2.6's text_config."""
    config = {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
        "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "attention_bias": False, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "hidden_act": "silu",
        "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "rope_scaling": yarn(),
        "max_position_embeddings": 262144, "vocab_size": 163840, "eos_token_id": 163586,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "top_k": 50,
        "quantization_config": int4_block(),
    }  # fmt: skip
    return copy.deepcopy({**config, **changes})


def k26(**changes: Any) -> Json:
    """Kimi K2.6's config.json, with changes to its text_config."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "eos_token_id": 163586,
        "tie_word_embeddings": False,
        "text_config": k26_text(**changes),
        "vision_config": {"patch_size": 14, "vt_hidden_size": 1152},
    }


def k2_instruct(**changes: Any) -> Json:
    """Kimi-K2-Instruct's config.json: flat, FP8, another YaRN."""
    return k26_text(
        rope_scaling=yarn(factor=32.0, beta_fast=1.0),
        rms_norm_eps=1e-6,
        max_position_embeddings=131072,
        eos_token_id=163585,
        quantization_config=fp8_block(),
        **changes,
    )


def glm_47_flash(**changes: Any) -> Json:
    """GLM-4.7-Flash's config.json: new rope layout, dense layers spelled one by one."""
    config = {
        "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"],
        "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
        "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "head_dim": 64,
        "attention_bias": False, "intermediate_size": 10240, "moe_intermediate_size": 1536,
        "mlp_layer_types": ["dense"] + ["sparse"] * 46, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "hidden_act": "silu",
        "rms_norm_eps": 1e-05, "rope_interleave": True, "max_position_embeddings": 202752,
        "rope_parameters": {
            "partial_rotary_factor": 1.0, "rope_theta": 1000000, "rope_type": "default",
        },
        "vocab_size": 154880, "eos_token_id": [154820, 154827, 154829],
        "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    return copy.deepcopy({**config, **changes})


def k25_drafter(dflash: Json | None = None, **changes: Any) -> Json:
    """z-lab/Kimi-K2.5-DFlash's config.json, with changes to dflash_config and to the rest."""
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False,
        "hidden_act": "silu", "hidden_size": 7168, "num_hidden_layers": 6,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 18432, "vocab_size": 163840, "num_target_layers": 61,
        "block_size": 8, "rope_theta": 50000, "rope_scaling": yarn(),
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 6, "sliding_window": None,
        "use_sliding_window": False,
        "dflash_config": {
            "target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838, **(dflash or {}),
        },
    }  # fmt: skip
    return copy.deepcopy({**config, **changes})


def without(config: Json, *names: str) -> Json:
    """A copy without the named fields."""
    return {name: value for name, value in config.items() if name not in names}
