"""Grouped-query attention of a draft block over the drafter's context cache."""

from k26jax.pallas.draft_attention.api import draft_attention

__all__ = ["draft_attention"]
