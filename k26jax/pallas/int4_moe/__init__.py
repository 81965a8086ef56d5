"""Routed experts, weights in INT4 or in a float type, decoded inside the product."""

from k26jax.pallas.int4_moe.api import experts
from k26jax.pallas.int4_moe.reference import ExpertWeights

__all__ = ["ExpertWeights", "experts"]
