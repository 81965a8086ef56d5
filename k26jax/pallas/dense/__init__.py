"""Products of a few rows with float weights, of any number of rows bit for bit alike."""

from k26jax.pallas.dense.api import absorb, dense, gated, partial_sums, values

__all__ = ["absorb", "dense", "gated", "partial_sums", "values"]
