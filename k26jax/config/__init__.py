"""What the published `config.json` files say, and what the user asked of the engine."""

from k26jax.config.draft import DraftConfig
from k26jax.config.engine import (
    AUTO,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    Algorithm,
    EngineConfig,
)
from k26jax.config.files import read_json
from k26jax.config.model import ModelConfig
from k26jax.config.quantization import Quantization
from k26jax.config.rope import RopeConfig

__all__ = [
    "AUTO",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_STOP_IDS",
    "Algorithm",
    "DraftConfig",
    "EngineConfig",
    "ModelConfig",
    "Quantization",
    "RopeConfig",
    "read_json",
]
