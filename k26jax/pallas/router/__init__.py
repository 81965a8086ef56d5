"""Chooses experts for tokens."""

from k26jax.pallas.router.api import route

__all__ = ["route"]
