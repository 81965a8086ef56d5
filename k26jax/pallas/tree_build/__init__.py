"""Builds draft trees in one launch."""

from k26jax.pallas.tree_build.api import build
from k26jax.pallas.tree_build.reference import Nodes

__all__ = ["Nodes", "build"]
