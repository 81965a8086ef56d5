"""What the published `config.json` files say, and what the user asked of the engine."""

from k26jax.config.draft import DraftConfig
from k26jax.config.engine import AUTO, MAX_STOP_IDS, Algorithm, EngineConfig
from k26jax.config.files import read_json
from k26jax.config.model import ModelConfig
from k26jax.config.quantization import Quantization
from k26jax.config.rope import RopeConfig

__all__ = [
    "AUTO",
    "MAX_STOP_IDS",
    "Algorithm",
    "DraftConfig",
    "EngineConfig",
    "ModelConfig",
    "Quantization",
    "RopeConfig",
    "read_json",
]
