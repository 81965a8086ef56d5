"""Folders, in the published layout, of a random pair that meshes of up to eight can share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from k26jax.config import DraftConfig, ModelConfig
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import declarations
from k26jax.model.target import Target

_TARGET = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 64, "moe_intermediate_size": 256,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "eos_token_id": 1,
    "bos_token_id": 0,
}  # fmt: skip
_DRAFTER = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 8, "intermediate_size": 32, "num_target_layers": 2,
    "block_size": 4, "layer_types": ["full_attention"],
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]},
}  # fmt: skip


def write_shared_pair(golden_dir: Path, folder: Path) -> dict[str, Any]:
    """Writes both folders and returns the options of `LLM` that tests of them share."""
    published = json.loads((golden_dir / "models" / "k2-int4" / "config.json").read_text())
    published["text_config"] |= _TARGET
    model = ModelConfig.from_dict(published)
    target = Target(model, dtype=jnp.float32, rngs=nnx.Rngs(0))
    target.lm_head[...] *= 4  # sharper, so that tokens differ from step to step
    drafted = json.loads((golden_dir / "drafter" / "config.json").read_text()) | _DRAFTER
    drafter = Drafter(DraftConfig.from_dict(drafted), dtype=jnp.float32, rngs=nnx.Rngs(1))
    for name, config, module in (("target", published, target), ("drafter", drafted, drafter)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(published_tensors(module), folder / name / "model.safetensors")
    return {
        "model_path": str(folder / "target"),
        "speculative_draft_model_path": str(folder / "drafter"),
        "speculative_ddtree_budget": 5,
        "context_length": 64,
        "chunked_prefill_size": 16,
        "max_running_requests": 2,
        "dtype": "float32",
    }


def published_tensors(module: nnx.Module) -> dict[str, np.ndarray]:
    """The tensors that a folder of this module holds."""
    tensors = {}
    variables = {
        ".".join(map(str, path)): variable
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
    for path, declared in declarations(module).items():
        stack = np.asarray(variables[path][...])
        for index, name in declared.source.names():
            tensors[name] = np.ascontiguousarray(stack[index].reshape(declared.tensor_shape))
    return tensors
