"""Finds the best tokens of rows of logits."""

from k26jax.pallas.vocab_topk.api import best_token, top_tokens
from k26jax.pallas.vocab_topk.reference import TopTokens

__all__ = ["TopTokens", "best_token", "top_tokens"]
