"""Norms, rotary embeddings and cache writes: what stands between the products."""

from k26jax.pallas.norm.api import add_rms_norm, append, head_norm, latent, rms_norm

__all__ = ["add_rms_norm", "append", "head_norm", "latent", "rms_norm"]
