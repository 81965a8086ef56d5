"""The config.json files of the small target and its drafter, in the published layouts."""

from __future__ import annotations

from typing import Any

BOS, EOS, END_OF_TURN, MEDIA, UNK, PAD = 3840, 3841, 3842, 3861, 4094, 4095
IGNORED = ["self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head"]


def target_config() -> dict[str, Any]:
    """Returns the target's config.json in the nested form of Kimi K2.6."""
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
        "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
        "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None}
    group |= {"targets": ["Linear"], "weights": weights}
    ignore = [f"re:.*{name}.*" for name in IGNORED] + ["re:vision_tower.*", "re:mm_projector.*"]
    quantization = {
        "config_groups": {"group_0": group}, "format": "pack-quantized", "ignore": ignore,
        "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip
    rope = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512, "type": "yarn",
    }  # fmt: skip
    text = {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": BOS,
        "eos_token_id": EOS, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 320, "initializer_range": 0.02, "intermediate_size": 768,
        "kv_lora_rank": 96, "max_position_embeddings": 2048, "model_type": "kimi_k2",
        "moe_intermediate_size": 160, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 16,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 8,
        "num_experts_per_tok": 4, "num_hidden_layers": 6, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 160,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "rms_norm_eps": 1e-5,
        "rope_scaling": rope, "rope_theta": 50000.0, "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 32,
        "vocab_size": 4096, "quantization_config": quantization,
    }  # fmt: skip
    return {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "torch_dtype": "bfloat16", "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
        "media_placeholder_token_id": MEDIA, "ignore_index": -100, "tie_word_embeddings": False,
        "text_config": text,
    }  # fmt: skip


def drafter_config() -> dict[str, Any]:
    """Returns the drafter's config.json in the form of the published DFlash folders."""
    rope = {
        "rope_type": "yarn", "type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 512,
    }  # fmt: skip
    return {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 8, "bos_token_id": BOS,
        "dflash_config": {"mask_token_id": UNK, "target_layer_ids": [1, 2, 4]},
        "dtype": "bfloat16", "eos_token_id": EOS, "head_dim": 32, "hidden_act": "silu",
        "hidden_size": 320, "initializer_range": 0.02, "intermediate_size": 512,
        "layer_types": ["full_attention"] * 3, "max_position_embeddings": 2048,
        "max_window_layers": 3, "model_type": "qwen3", "num_attention_heads": 8,
        "num_hidden_layers": 3, "num_key_value_heads": 4, "num_target_layers": 6,
        "rms_norm_eps": 1e-5, "rope_scaling": rope, "rope_theta": 50000.0, "sliding_window": None,
        "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
        "vocab_size": 4096,
    }  # fmt: skip
