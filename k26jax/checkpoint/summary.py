"""What a model folder holds, from its headers alone, and what would not load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from k26jax.checkpoint.load import plan_load
from k26jax.checkpoint.reader import Checkpoint, open_checkpoint
from k26jax.config import DraftConfig, ModelConfig, read_json
from k26jax.errors import CheckpointError
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import abstract
from k26jax.model.target import Target

# (word in a tensor's name, component), first match wins.
_COMPONENTS = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    ("norm", "norms"),
    ("self_attn", "attention"),
    (".mlp.experts.", "routed experts"),
    ("shared_experts", "shared experts"),
    (".mlp.gate.", "router"),
    (".mlp.", "dense feed-forward"),
    ("fc.weight", "feature projection"),
)


@dataclass(frozen=True)
class Summary:
    """A folder's content.

    parameters, stored_bytes: by component; INT4 weights count as weights, not as words.
    dtypes: stored bytes by dtype.
    facts: configuration values worth showing.
    skipped: number of skipped tensors by reason.
    fault: why it would not load, or None.
    """

    folder: str
    kind: str
    facts: dict[str, Any]
    parameters: dict[str, int] = field(default_factory=dict)
    stored_bytes: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    fault: str | None = None


def summarize(folder: str | Path) -> Summary:
    """Returns what a target or drafter folder holds.

    Raises: ConfigError for a configuration that cannot be read, CheckpointError for damaged files.
    Cost: reads headers, and INT4 shape tensors of a few bytes.
    """
    folder = Path(folder)
    data = read_json(folder / "config.json")
    layers = None
    if data.get("architectures") == ["DFlashDraftModel"]:
        draft = DraftConfig.from_folder(folder)
        kind, facts = "DFlash drafter", _draft_facts(draft)
        module = abstract(lambda rngs: Drafter(draft, dtype=jnp.float32, rngs=rngs))
    else:
        model = ModelConfig.from_folder(folder)
        kind, facts, layers = model.model_type, _model_facts(model), model.num_hidden_layers
        module = abstract(lambda rngs: Target(model, dtype=jnp.float32, rngs=rngs))
    with open_checkpoint(folder, num_hidden_layers=layers) as checkpoint:
        fault = None
        try:
            plan_load(checkpoint, module)
        except CheckpointError as error:
            fault = str(error)
        parameters, stored, dtypes = _count(checkpoint)
        return Summary(
            folder=str(folder),
            kind=kind,
            facts=facts,
            parameters=parameters,
            stored_bytes=stored,
            dtypes=dtypes,
            skipped=dict(Counter(checkpoint.skipped.values())),
            fault=fault,
        )


def _count(checkpoint: Checkpoint) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    parameters: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for name in checkpoint.names():
        entry = checkpoint.entry(name)
        component = next((label for word, label in _COMPONENTS if word in name), "other")
        count = 1
        for size in entry.shape:
            count *= size
        if name.endswith(".weight_packed"):
            count *= 8
        if not name.endswith((".weight_scale", ".weight_shape", "_scale_inv")):
            parameters[component] += count
        stored[component] += entry.end - entry.begin
        dtypes[entry.dtype] += entry.end - entry.begin
    return dict(parameters), dict(stored), dict(dtypes)


def _model_facts(config: ModelConfig) -> dict[str, Any]:
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return {
        "layers": f"{config.num_hidden_layers} ({len(config.dense_layer_ids)} dense)",
        "hidden_size": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "experts": f"{config.n_routed_experts}, {config.num_experts_per_tok} a token, "
        f"{config.n_shared_experts} shared",
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "quantization": config.quantization.value,
        "end tokens": list(config.eos_token_ids),
        "cache bytes a token (bfloat16)": 2 * config.num_hidden_layers * width,
    }


def _draft_facts(config: DraftConfig) -> dict[str, Any]:
    width = 2 * config.num_key_value_heads * config.head_dim
    return {
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "block size": config.block_size,
        "mask token": config.mask_token_id,
        "target layers read": list(config.target_layer_ids),
        "target layers in all": config.num_target_layers,
        "vocabulary": config.vocab_size,
        "rotary amplitude": config.rope.amplitude,
        "cache bytes a token (bfloat16)": 2 * config.num_hidden_layers * width,
    }
