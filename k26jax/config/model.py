"""The target model's configuration, read from a Hugging Face folder; no value is guessed.

Field names are the ones in `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k26jax.config.files import Fields, read_json
from k26jax.config.quantization import GROUP_SIZE, Quantization, parse_quantization
from k26jax.config.rope import RopeConfig, parse_rope
from k26jax.errors import ConfigError

TEXT_MODEL_TYPES = ("kimi_k2", "deepseek_v3", "deepseek_v2", "glm4_moe_lite")
NESTED_MODEL_TYPES = ("kimi_k25",)
_RELATIVES = {
    "kimi_linear": "its layers mix linear attention (KDA) with position-free MLA",
    "kimi_k3": "it adds attention-residual mixing",
    "deepseek_v32": "it adds a sparse-attention indexer",
    "glm_moe_dsa": "it adds a sparse-attention indexer",
}
_SPARSE_KEYS = ("index_topk", "index_n_heads", "linear_attn_config")


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V3 style decoder: MLA attention, a few dense layers, then mixture of experts.

    q_lora_rank: None where the query has one projection instead of two.
    n_shared_experts: width of the shared expert in units of moe_intermediate_size; 0: none.
    latent_norm_eps: epsilon of the two latent norms, 1e-6 in Hugging Face's code whatever
        rms_norm_eps says; serving engines use rms_norm_eps there.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    moe_layer_freq: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    rope_interleave: bool = True
    tie_word_embeddings: bool = False
    quantization: Quantization = Quantization.NONE
    latent_norm_eps: float = 1e-6

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Returns the configuration of a model folder, stop ids from `generation_config.json` too.

        Raises: ConfigError if the folder's model is not one this engine runs.
        """
        folder = Path(folder)
        config = cls.from_dict(read_json(folder / "config.json"), str(folder / "config.json"))
        generation = folder / "generation_config.json"
        if generation.is_file():
            extra = _token_ids(read_json(generation).get("eos_token_id"), str(generation))
            _check_token_ids(extra, config.vocab_size, str(generation))
            known = config.eos_token_ids
            config = replace(config, eos_token_ids=tuple(dict.fromkeys(known + extra)))
        return config

    @classmethod
    def from_dict(cls, data: dict[str, Any], origin: str = "config.json") -> ModelConfig:
        """Returns the configuration that a parsed `config.json` describes."""
        fields = Fields(data, origin)
        fields.refuse_other_dtypes()
        if fields.get("model_type", str) in NESTED_MODEL_TYPES:
            text = fields.get("text_config", dict)
            merged = {**text}
            if merged.get("quantization_config") is None:
                merged["quantization_config"] = data.get("quantization_config")
            ids = [*_token_ids(data.get("eos_token_id"), origin)]
            ids += _token_ids(text.get("eos_token_id"), origin)
            merged["eos_token_id"] = list(dict.fromkeys(ids))
            return cls.from_dict(merged, f"{origin} text_config")
        _refuse_relatives(data, origin)
        return _parse_text_config(data, origin)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(
            layer
            for layer in range(self.first_k_dense_replace, self.num_hidden_layers)
            if layer % self.moe_layer_freq == 0
        )

    @property
    def dense_layer_ids(self) -> tuple[int, ...]:
        """Indices of the layers with one dense feed-forward block."""
        moe = set(self.moe_layer_ids)
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in moe)

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention scores, YaRN's mscale squared included."""
        head = self.qk_nope_head_dim + self.qk_rope_head_dim
        return head**-0.5 * self.rope.softmax_factor

    @property
    def has_selection_bias(self) -> bool:
        """Whether the router adds e_score_correction_bias before choosing."""
        return self.topk_method == "noaux_tc"


def _refuse_relatives(data: dict[str, Any], origin: str) -> None:
    model_type = data.get("model_type")
    if model_type in _RELATIVES:
        raise ConfigError(
            f"{origin}: model_type {model_type!r} is not supported: {_RELATIVES[model_type]}"
        )
    if model_type not in TEXT_MODEL_TYPES:
        known = ", ".join(TEXT_MODEL_TYPES + NESTED_MODEL_TYPES)
        raise ConfigError(f"{origin}: model_type {model_type!r} is not supported; known: {known}")
    for key in _SPARSE_KEYS:
        if data.get(key) is not None:
            raise ConfigError(
                f"{origin}: field {key!r} describes sparse or linear attention, which this engine "
                "does not run; plain DeepSeek-V3 attention only"
            )


def _parse_text_config(data: dict[str, Any], origin: str) -> ModelConfig:
    fields = Fields(data, origin)
    fields.refuse("hidden_act", ("silu",), "only silu is implemented")
    fields.refuse("attention_bias", (False,), "attention biases are not implemented")
    if "q_lora_rank" not in data:
        raise ConfigError(f"{origin}: field 'q_lora_rank' is missing (null means one projection)")
    sigmoid = data["model_type"] != "deepseek_v2"
    # Absent in files written for classes that know one kind of router only.
    topk_method = fields.get("topk_method", str, "noaux_tc" if sigmoid else "greedy")
    is_grouped = topk_method != "greedy"
    config = ModelConfig(
        model_type=data["model_type"],
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        num_hidden_layers=fields.positive("num_hidden_layers"),
        num_attention_heads=fields.positive("num_attention_heads"),
        q_lora_rank=None if data["q_lora_rank"] is None else fields.positive("q_lora_rank"),
        kv_lora_rank=fields.positive("kv_lora_rank"),
        qk_nope_head_dim=fields.positive("qk_nope_head_dim"),
        qk_rope_head_dim=fields.positive("qk_rope_head_dim"),
        v_head_dim=fields.positive("v_head_dim"),
        intermediate_size=fields.positive("intermediate_size"),
        moe_intermediate_size=fields.positive("moe_intermediate_size"),
        first_k_dense_replace=_first_k_dense_replace(fields),
        moe_layer_freq=fields.positive("moe_layer_freq", 1),
        n_routed_experts=fields.positive("n_routed_experts"),
        num_experts_per_tok=fields.positive("num_experts_per_tok"),
        n_shared_experts=fields.get("n_shared_experts", int, 0),
        # Published classes disagree on the default, so grouped routers must state both.
        n_group=fields.positive("n_group") if is_grouped else 1,
        topk_group=fields.positive("topk_group") if is_grouped else 1,
        scoring_func=fields.get("scoring_func", str, "sigmoid" if sigmoid else "softmax"),
        topk_method=topk_method,
        norm_topk_prob=fields.get("norm_topk_prob", bool),
        routed_scaling_factor=fields.get("routed_scaling_factor", float),
        rms_norm_eps=fields.get("rms_norm_eps", float),
        rope=parse_rope(data, origin),
        max_position_embeddings=fields.positive("max_position_embeddings"),
        eos_token_ids=_token_ids(data.get("eos_token_id"), origin),
        rope_interleave=fields.get("rope_interleave", bool, True),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
        quantization=parse_quantization(fields.get("quantization_config", dict, None), origin),
    )
    _check(config, origin)
    return config


def _first_k_dense_replace(fields: Fields) -> int:
    """Returns the number of leading dense layers, which GLM's files may spell layer by layer."""
    kinds = fields.get("mlp_layer_types", list, None)
    if kinds is None:
        return fields.get("first_k_dense_replace", int)
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (fields.positive("num_hidden_layers") - dense):
        raise ConfigError(
            f"{fields.origin}: mlp_layer_types {kinds} must be dense layers, then sparse ones, "
            "num_hidden_layers in all"
        )
    stated = fields.get("first_k_dense_replace", int, dense)
    if stated != dense:
        raise ConfigError(
            f"{fields.origin}: first_k_dense_replace = {stated}, but mlp_layer_types names "
            f"{dense} dense layers"
        )
    return dense


def _check(config: ModelConfig, origin: str) -> None:
    if config.scoring_func not in ("sigmoid", "softmax"):
        raise ConfigError(f"{origin}: scoring_func {config.scoring_func!r} is not supported")
    if config.topk_method not in ("noaux_tc", "greedy", "group_limited_greedy"):
        raise ConfigError(f"{origin}: topk_method {config.topk_method!r} is not supported")
    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups or config.topk_group > groups:
        raise ConfigError(
            f"{origin}: {experts} experts do not form n_group = {groups} equal groups of which "
            f"topk_group = {config.topk_group} are kept"
        )
    choosable = experts // groups * config.topk_group
    if config.num_experts_per_tok > choosable:
        raise ConfigError(
            f"{origin}: num_experts_per_tok = {config.num_experts_per_tok} exceeds the "
            f"{choosable} experts that can be chosen"
        )
    if config.quantization is Quantization.INT4_EXPERTS:
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, name) % GROUP_SIZE:
                raise ConfigError(
                    f"{origin}: {name} = {getattr(config, name)} does not divide into INT4 groups "
                    f"of {GROUP_SIZE}"
                )
    if config.qk_rope_head_dim % 2:
        raise ConfigError(f"{origin}: qk_rope_head_dim = {config.qk_rope_head_dim} is odd")
    if not 0 <= config.first_k_dense_replace <= config.num_hidden_layers:
        raise ConfigError(
            f"{origin}: first_k_dense_replace = {config.first_k_dense_replace} is outside the "
            f"{config.num_hidden_layers} layers"
        )
    _check_token_ids(config.eos_token_ids, config.vocab_size, origin)


def _check_token_ids(ids: tuple[int, ...], vocab_size: int, origin: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{origin}: eos_token_id {token} is outside the vocabulary of {vocab_size}"
            )


def _token_ids(value: Any, origin: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
        raise ConfigError(f"{origin}: eos_token_id is {value!r}, expected integers")
    return tuple(dict.fromkeys(ids))
