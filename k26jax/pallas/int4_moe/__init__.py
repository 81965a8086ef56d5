"""Routed experts, weights in INT4 or in a float type, decoded inside the product."""

from k26jax.pallas.int4_moe.api import BLOCK_ROWS, expert_columns, experts, prompt_block_rows
from k26jax.pallas.int4_moe.kernel import experts as tiled_experts
from k26jax.pallas.int4_moe.layout import TiledExperts, Tiles, arrange
from k26jax.pallas.int4_moe.reference import ExpertWeights, Shared

__all__ = [
    "BLOCK_ROWS",
    "ExpertWeights",
    "Shared",
    "TiledExperts",
    "Tiles",
    "arrange",
    "expert_columns",
    "experts",
    "prompt_block_rows",
    "tiled_experts",
]
