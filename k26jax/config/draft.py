"""The DFlash drafter's configuration, read from a published drafter folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k26jax.config.files import Fields, read_json
from k26jax.config.model import ModelConfig
from k26jax.config.rope import RopeConfig, parse_rope
from k26jax.errors import ConfigError


@dataclass(frozen=True)
class DraftConfig:
    """A block drafter: a Qwen3-style decoder fed with hidden states of the target.

    block_size: rows of one draft pass, the known first token included.
    target_layer_ids: target layers whose outputs are concatenated, in this order.
    windows: per layer, how many positions back a row sees; None: everything.
    causal: per layer, whether a block row sees only itself and earlier rows of the block.
    sample_from_anchor: row j predicts position start + j + 1 instead of start + j.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_target_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rms_norm_eps: float
    rope: RopeConfig
    sample_from_anchor: bool = False

    @classmethod
    def from_folder(cls, folder: str | Path) -> DraftConfig:
        """Returns the configuration of a drafter folder."""
        path = Path(folder) / "config.json"
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], origin: str = "config.json") -> DraftConfig:
        """Returns the configuration that a parsed drafter `config.json` describes.

        Raises: ConfigError for another drafter family, a missing or an unsupported field.
        """
        fields = Fields(data, origin)
        architectures = fields.get("architectures", list, [])
        if architectures != ["DFlashDraftModel"]:
            raise ConfigError(
                f"{origin}: architectures {architectures} is not a DFlash drafter; "
                "expected ['DFlashDraftModel']"
            )
        fields.refuse_other_dtypes()
        fields.refuse("attention_bias", (False,), "attention biases are not implemented")
        fields.refuse("hidden_act", ("silu",), "only silu is implemented")
        for name in ("input_embedding_scale", "output_multiplier"):
            fields.refuse(name, (1, 1.0), "only 1 is implemented")
        fields.refuse("final_logit_softcapping", (0, 0.0), "soft-capping is not implemented")
        dflash = Fields(fields.get("dflash_config", dict, {}), f"{origin} dflash_config")
        both = Fields({**data, **dflash.data}, origin)
        layers = fields.positive("num_hidden_layers")
        targets = fields.positive("num_target_layers")
        windows, causal = _layer_masks(fields, dflash, layers)
        config = cls(
            vocab_size=fields.positive("vocab_size"),
            hidden_size=fields.positive("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=fields.positive("num_attention_heads"),
            num_key_value_heads=fields.positive("num_key_value_heads"),
            head_dim=fields.positive("head_dim"),
            intermediate_size=fields.positive("intermediate_size"),
            num_target_layers=targets,
            block_size=both.positive("block_size"),
            mask_token_id=both.get("mask_token_id", int),
            target_layer_ids=both.ints("target_layer_ids")
            if both.data.get("target_layer_ids") is not None
            else default_target_layer_ids(targets, layers),
            windows=windows,
            causal=causal,
            rms_norm_eps=fields.get("rms_norm_eps", float),
            rope=parse_rope(data, origin),
            sample_from_anchor=both.get("sample_from_anchor", bool, False),
        )
        _check(config, origin)
        return config

    @property
    def depth(self) -> int:
        """Drafted tokens of one pass: the greatest depth of a draft tree."""
        return self.depth_of(self.block_size)

    def depth_of(self, block_size: int) -> int:
        """Drafted tokens of a pass with another block size."""
        return block_size if self.sample_from_anchor else block_size - 1

    def check_target(self, target: ModelConfig, origin: str = "drafter") -> None:
        """Raises ConfigError unless this drafter was made for a target of this shape."""
        for name, mine, theirs in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_hidden_layers),
        ):
            if mine != theirs:
                raise ConfigError(
                    f"{origin}: {name} = {mine} but the target has {theirs}; "
                    "this drafter belongs to another model"
                )


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Returns the layers tapped when a drafter folder does not list them.

    Source: the published DFlash code; one layer in the middle, or evenly spread from 1 to N - 3.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def _layer_masks(
    fields: Fields, dflash: Fields, layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    if "layer_types" not in fields.data:
        fields.refuse("use_sliding_window", (False,), "layer_types must name the sliding layers")
    kinds = fields.get("layer_types", list, ["full_attention"] * layers)
    if len(kinds) != layers or any(
        kind not in ("full_attention", "sliding_attention") for kind in kinds
    ):
        raise ConfigError(
            f"{fields.origin}: layer_types {kinds} must name full_attention or sliding_attention "
            f"once for each of the {layers} layers"
        )
    everywhere = dflash.get("use_swa", bool, False)
    window = fields.get("sliding_window", int, None)
    if everywhere:
        window = dflash.get("swa_window_size", int, window)
    sliding = [everywhere or kind == "sliding_attention" for kind in kinds]
    if any(sliding) and not (isinstance(window, int) and window > 0):
        raise ConfigError(f"{fields.origin}: sliding layers need a positive sliding_window")
    stated = dflash.get("causal", bool, fields.get("is_causal", bool, None))
    causal = [slides and not everywhere if stated is None else stated for slides in sliding]
    return tuple(window if slides else None for slides in sliding), tuple(causal)


def _check(config: DraftConfig, origin: str) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{origin}: {config.num_attention_heads} query heads do not divide into "
            f"{config.num_key_value_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise ConfigError(f"{origin}: head_dim = {config.head_dim} is odd")
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ConfigError(
            f"{origin}: mask_token_id {config.mask_token_id} is outside the vocabulary of "
            f"{config.vocab_size}"
        )
    if not config.target_layer_ids:
        raise ConfigError(f"{origin}: target_layer_ids is empty, expected one or more")
    for layer in config.target_layer_ids:
        if not 0 <= layer < config.num_target_layers:
            raise ConfigError(
                f"{origin}: target_layer_ids names layer {layer} of {config.num_target_layers}"
            )
    if config.depth < 1:
        raise ConfigError(f"{origin}: block_size {config.block_size} drafts nothing, need 2")
