"""SwiGLU feed-forward blocks in a float type: dense layers and the shared expert."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from k26jax.model.layers import linear, swiglu
from k26jax.model.parameters import Source, declare


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
        def weight(name: str, shape: tuple[int, int], axes: tuple[str, str]):
            source = Source(f"{prefix}.{name}.weight", layers=layers)
            stacked = (len(layers), *shape)
            return declare(rngs, stacked, ("layer", *axes), source, dtype=dtype)

        self.gate_proj = weight("gate_proj", (inner, hidden), ("ffn", "hidden"))
        self.up_proj = weight("up_proj", (inner, hidden), ("ffn", "hidden"))
        self.down_proj = weight("down_proj", (hidden, inner), ("hidden", "ffn"))

    def __call__(self, row: int, x: jax.Array) -> jax.Array:
        """Returns the output of the stack's `row`-th block for x [..., d]."""
        inner = swiglu(linear(x, self.gate_proj[row]), linear(x, self.up_proj[row]))
        return linear(inner, self.down_proj[row])
