"""Absorbed MLA attention of a tree of tokens over a latent cache."""

from k26jax.pallas.tree_mla.api import tree_mla

__all__ = ["tree_mla"]
