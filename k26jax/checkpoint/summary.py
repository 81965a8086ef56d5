"""What a model folder holds, from its headers alone, and what would not load."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k26jax.checkpoint.load import plan_load
from k26jax.checkpoint.models import DeclaredModel, declared_model
from k26jax.checkpoint.reader import Checkpoint, open_checkpoint
from k26jax.config import DraftConfig, ModelConfig
from k26jax.errors import K26Error

# (part of a tensor's name, component), first match wins.
_COMPONENTS = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    ("norm", "norms"),
    ("self_attn.", "attention"),
    ("mlp.experts.", "routed experts"),
    ("mlp.shared_experts.", "shared experts"),
    ("mlp.gate.", "router"),
    ("mlp.", "dense"),
    ("fc.", "feature projection"),
)
_COMPANIONS = (".weight_scale", ".weight_shape", "_scale_inv")
_INT4_IN_A_WORD = 8


@dataclass
class Component:
    """One part of a model.

    parameters: weights; INT4 ones count one by one, their scales do not count.
    bytes_by_dtype: stored bytes by the files' dtype, scales included.
    """

    parameters: int = 0
    bytes_by_dtype: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all dtypes."""
        return sum(self.bytes_by_dtype.values())


@dataclass
class Summary:
    """A folder's content; what cannot be read is left empty, and `fault` says why.

    kind: "target", "drafter" or "unknown".
    facts: configuration values worth showing, by a readable name.
    components: by name, of the tensors that the model uses.
    files, file_bytes: weight files that hold them, and the tensors' bytes in them.
    skipped: number of skipped tensors by reason.
    ignored_files: weight files that the index does not mention.
    fault: why the folder would not load, or None.
    """

    folder: str
    kind: str = "unknown"
    facts: dict[str, Any] = field(default_factory=dict)
    components: dict[str, Component] = field(default_factory=dict)
    files: int = 0
    file_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    ignored_files: list[str] = field(default_factory=list)
    fault: str | None = None


def summarize(folder: str | Path) -> Summary:
    """Returns what a target or drafter folder holds.

    Cost: reads headers, and INT4 shape tensors of a few bytes.
    """
    folder = Path(folder)
    summary = Summary(str(folder))
    try:
        model = declared_model(folder)
        _describe(model, summary)
        with open_checkpoint(folder, num_hidden_layers=model.layers) as checkpoint:
            _count(checkpoint, summary)
            plan_load(checkpoint, model.module)
    except K26Error as error:
        summary.fault = str(error)
    return summary


def _describe(model: DeclaredModel, summary: Summary) -> None:
    config = model.config
    summary.kind = model.kind
    summary.facts = (
        _model_facts(config) if isinstance(config, ModelConfig) else _draft_facts(config)
    )


def _count(checkpoint: Checkpoint, summary: Summary) -> None:
    files = set()
    for name, entry in checkpoint.entries.items():
        label = next((label for part, label in _COMPONENTS if part in name), "other")
        component = summary.components.setdefault(label, Component())
        if not name.endswith(_COMPANIONS):
            words = _INT4_IN_A_WORD if name.endswith(".weight_packed") else 1
            component.parameters += words * math.prod(entry.shape)
        sizes = component.bytes_by_dtype
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.size_bytes
        files.add(entry.file)
    summary.files, summary.file_bytes = len(files), checkpoint.total_bytes()
    summary.skipped = dict(Counter(checkpoint.skipped.values()))
    summary.ignored_files = list(checkpoint.ignored_files)


def _model_facts(config: ModelConfig) -> dict[str, Any]:
    row = config.kv_lora_rank + config.qk_rope_head_dim
    return {
        "model type": config.model_type,
        "layers": config.num_hidden_layers,
        "dense layers": len(config.dense_layer_ids),
        "hidden size": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "routed experts": config.n_routed_experts,
        "experts a token": config.num_experts_per_tok,
        "shared experts": config.n_shared_experts,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "quantization": config.quantization.value,
        "cache bytes a token (BF16)": 2 * config.num_hidden_layers * row,
        "end tokens": list(config.eos_token_ids),
    }


def _draft_facts(config: DraftConfig) -> dict[str, Any]:
    row = 2 * config.num_key_value_heads * config.head_dim
    return {
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "block size": config.block_size,
        "drafted tokens a pass": config.depth,
        "mask token": config.mask_token_id,
        "target layers read": list(config.target_layer_ids),
        "target layers in all": config.num_target_layers,
        "vocabulary": config.vocab_size,
        "cache bytes a token (BF16)": 2 * config.num_hidden_layers * row,
    }
