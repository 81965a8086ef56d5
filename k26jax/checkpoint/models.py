"""Which model a folder holds: its configuration and its abstract module."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from k26jax.config import DraftConfig, ModelConfig, read_json
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import abstract
from k26jax.model.target import Target


@dataclass(frozen=True)
class DeclaredModel:
    """A folder's model without its weights.

    module: abstract.
    layers: past which a checkpoint's layers are skipped; None for a drafter.
    """

    config: ModelConfig | DraftConfig
    module: nnx.Module
    layers: int | None

    @property
    def kind(self) -> str:
        """Returns "target" or "drafter"."""
        return "target" if isinstance(self.config, ModelConfig) else "drafter"


def is_drafter(folder: Path) -> bool:
    """Whether a folder's configuration is a DFlash drafter's."""
    return read_json(folder / "config.json").get("architectures") == ["DFlashDraftModel"]


def declared_model(folder: Path, dtype: Any = jnp.float32) -> DeclaredModel:
    """Returns the model that a folder's configuration describes.

    Args:
      dtype: of the declared float parameters.

    Raises: ConfigError if it is none that this engine runs.
    """
    if is_drafter(folder):
        return declared(DraftConfig.from_folder(folder), dtype)
    return declared(ModelConfig.from_folder(folder), dtype)


def declared(config: ModelConfig | DraftConfig, dtype: Any = jnp.float32) -> DeclaredModel:
    """Returns the model of a configuration."""
    if isinstance(config, DraftConfig):
        module = abstract(lambda rngs: Drafter(config, dtype=dtype, rngs=rngs))
        return DeclaredModel(config, module, None)
    module = abstract(lambda rngs: Target(config, dtype=dtype, rngs=rngs))
    return DeclaredModel(config, module, config.num_hidden_layers)


def with_layers(config_json: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns a target's config.json, parsed, for its first `layers` layers."""
    data = copy.deepcopy(config_json)
    text = data.get("text_config") or data
    text["num_hidden_layers"] = layers
    if text.get("mlp_layer_types") is not None:
        text["mlp_layer_types"] = text["mlp_layer_types"][:layers]
    return data
