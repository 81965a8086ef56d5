"""Published models by their short names, and their drafters; no weights and no JAX.

The files in `configs/` hold the meaningful fields of the published `config.json` files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from k26jax.config import DraftConfig, ModelConfig
from k26jax.config.files import read_json
from k26jax.errors import ConfigError, nearest

FOLDER = Path(__file__).parent / "configs"
MODELS = ("kimi-k2.6", "deepseek-v3", "moonlight")
DRAFT_LAYERS = 6
BLOCK_SIZE = 8


def published(name: str, layers: int | None = None) -> tuple[ModelConfig, DraftConfig]:
    """Returns a published model and a drafter for it.

    Args:
      layers: of the target; fewer than it has leave its last ones out, and the drafter reads
        others. None: all.

    Raises: ConfigError for an unknown name, or more layers than the model has.
    """
    if name not in MODELS:
        raise ConfigError(
            f"no model {name!r}; there are {', '.join(MODELS)}{nearest(name, MODELS)}"
        )
    path = FOLDER / f"{name}.json"
    model = ModelConfig.from_dict(read_json(path), str(path))
    draft = _drafter(name, model)
    if layers is None or layers == model.num_hidden_layers:
        return model, draft
    if not model.first_k_dense_replace < layers < model.num_hidden_layers:
        raise ConfigError(
            f"{name}: --layers {layers} is not between {model.first_k_dense_replace + 1} (the "
            f"first with experts) and the model's {model.num_hidden_layers}"
        )
    taps = _taps(layers, len(draft.target_layer_ids))
    draft = dataclasses.replace(draft, num_target_layers=layers, target_layer_ids=taps)
    return dataclasses.replace(model, num_hidden_layers=layers), draft


def has_published_drafter(name: str) -> bool:
    """Whether the drafter of a model is a published one, not one made up in its image."""
    return (FOLDER / f"{name}-drafter.json").is_file()


def _drafter(name: str, model: ModelConfig) -> DraftConfig:
    if has_published_drafter(name):
        path = FOLDER / f"{name}-drafter.json"
        draft = DraftConfig.from_dict(read_json(path), str(path))
        draft.check_target(model, str(path))
        return draft
    # Of the published Kimi drafter's form: 64 heads of 128 for a width of 7168.
    return DraftConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=DRAFT_LAYERS,
        num_attention_heads=-(-model.hidden_size // 2048) * 16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=model.intermediate_size,
        num_target_layers=model.num_hidden_layers,
        block_size=BLOCK_SIZE,
        mask_token_id=model.vocab_size - 2,
        target_layer_ids=_taps(model.num_hidden_layers, DRAFT_LAYERS),
        windows=(None,) * DRAFT_LAYERS,
        causal=(False,) * DRAFT_LAYERS,
        rms_norm_eps=model.rms_norm_eps,
        rope=model.rope,
    )


def _taps(layers: int, count: int) -> tuple[int, ...]:
    """Returns `count` layers, spread evenly; some twice where there are fewer."""
    return tuple(round(i * (layers - 1) / (count - 1)) for i in range(count))
