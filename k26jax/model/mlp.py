"""SwiGLU feed-forward blocks in a float type: dense layers and the shared expert."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from k26jax.model.layers import flat, summed_dense
from k26jax.model.parameters import Source, declare
from k26jax.pallas.dense import gated


class SwiGLU(nnx.Module):
    """W_down(silu(W_gate x) * W_up x) of several layers, stacked."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        layers: tuple[int, ...],
        prefix: str,
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.inner = inner

        def weight(name: str, shape: tuple[int, int], axes: tuple[str, str]):
            source = Source(f"{prefix}.{name}.weight", layers=layers)
            stacked = (len(layers), *shape)
            return declare(rngs, stacked, ("layer", *axes), source, dtype=dtype)

        self.gate_proj = weight("gate_proj", (inner, hidden), ("ffn", "hidden"))
        self.up_proj = weight("up_proj", (inner, hidden), ("ffn", "hidden"))
        self.down_proj = weight("down_proj", (hidden, inner), ("hidden", "ffn"))

    def __call__(self, row: int, x: jax.Array, kernels: str = "reference") -> jax.Array:
        """Returns the output of the stack's `row`-th block for x [..., d]."""
        (inner,) = gated(
            flat(x), self.gate_proj[...], self.up_proj[...], layer=row, kernels=kernels
        )
        return self.down(row, inner, kernels).reshape(x.shape)

    def down(self, row: int, inner: jax.Array, kernels: str) -> jax.Array:
        """Returns rows [n, f] behind SwiGLU times the `row`-th down projection."""
        weights = self.down_proj[...]
        return summed_dense(inner, weights, layer=row, inputs=self.inner, kernels=kernels)
