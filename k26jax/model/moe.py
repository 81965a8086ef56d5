"""Mixture-of-experts blocks: router, routed experts (INT4 or float) and the shared expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k26jax.config import ModelConfig, Quantization
from k26jax.model.mlp import SwiGLU
from k26jax.model.parameters import Source, declare
from k26jax.pallas.int4_moe import ExpertWeights, experts
from k26jax.pallas.int4_moe.reference import GROUP_SIZE
from k26jax.pallas.products import contract
from k26jax.pallas.router import route


class ExpertProjection(nnx.Module):
    """One projection of all experts of all MoE layers, [l, e, o, i], in its stored form."""

    def __init__(
        self, config: ModelConfig, name: str, out: int, inner: int, *, dtype: Any, rngs: nnx.Rngs
    ):
        layers, n_experts = config.moe_layer_ids, config.n_routed_experts
        prefix = f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}"
        axes = ("hidden", "ffn") if name == "down_proj" else ("ffn", "hidden")

        def weight(suffix: str, width: int, kind: Any, dtypes: tuple[str, ...], init: Any = None):
            source = Source(
                f"{prefix}.{suffix}", layers=layers, experts=n_experts, published_dtypes=dtypes
            )
            shape = (len(layers), n_experts, out, width)
            return declare(rngs, shape, ("layer", "expert", *axes), source, dtype=kind, init=init)

        if config.quantization is Quantization.INT4_EXPERTS:
            groups = -(-inner // GROUP_SIZE)
            self.weight_packed = weight("weight_packed", -(-inner // 8), jnp.int32, ("I32",), _bits)
            self.weight_scale = weight(
                "weight_scale", groups, jnp.bfloat16, ("BF16", "F16", "F32"), _scales(inner)
            )
        else:
            self.weight = weight("weight", inner, dtype, Source.published_dtypes)

    def stack(self) -> ExpertWeights:
        """Returns the whole stack, for the kernel to index."""
        if hasattr(self, "weight"):
            return ExpertWeights(self.weight[...])
        return ExpertWeights(self.weight_packed[...], self.weight_scale[...])


class MoE(nnx.Module):
    """The mixture-of-experts blocks of all MoE layers, stacked."""

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        layers, hidden = config.moe_layer_ids, config.hidden_size
        n_experts, inner = config.n_routed_experts, config.moe_intermediate_size
        self.gate = declare(
            rngs,
            (len(layers), n_experts, hidden),
            ("layer", "router", "hidden"),
            Source("model.layers.{layer}.mlp.gate.weight", layers=layers),
            dtype=dtype,
        )
        if config.has_selection_bias:
            self.e_score_correction_bias = declare(
                rngs,
                (len(layers), n_experts),
                ("layer", "router"),
                Source("model.layers.{layer}.mlp.gate.e_score_correction_bias", layers=layers),
                dtype=jnp.float32,
            )
        kinds = {"dtype": dtype, "rngs": rngs}
        self.gate_proj = ExpertProjection(config, "gate_proj", inner, hidden, **kinds)
        self.up_proj = ExpertProjection(config, "up_proj", inner, hidden, **kinds)
        self.down_proj = ExpertProjection(config, "down_proj", hidden, inner, **kinds)
        if config.n_shared_experts:
            self.shared_experts = SwiGLU(
                hidden,
                inner * config.n_shared_experts,
                layers,
                "model.layers.{layer}.mlp.shared_experts",
                **kinds,
            )

    def routing(self, row: int, x: jax.Array, kernels: str) -> tuple[jax.Array, jax.Array]:
        """Returns topk_ids and topk_weights [n, k] for rows x [n, d], all in float32."""
        config = self.config
        logits = contract("ni,ei->ne", x.astype(jnp.float32), self.gate[row].astype(jnp.float32))
        return route(
            logits,
            self.e_score_correction_bias[row] if config.has_selection_bias else None,
            num_experts_per_tok=config.num_experts_per_tok,
            scoring_func=config.scoring_func,
            topk_method=config.topk_method,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            kernels=kernels,
        )

    def __call__(
        self,
        row: int,
        x: jax.Array,
        valid: jax.Array,
        kernels: str,
        differentiable: bool = False,
    ) -> jax.Array:
        """Returns the output of the stack's `row`-th block.

        Args:
          x: [n, d].
          valid: bool [n]; other rows choose no expert.
          differentiable: run every expert on every row.
        """
        topk_ids, topk_weights = self.routing(row, x, kernels)
        topk_ids = jnp.where(valid[:, None], topk_ids, self.config.n_routed_experts)
        routed = experts(
            x,
            topk_ids,
            topk_weights,
            self.gate_proj.stack(),
            self.up_proj.stack(),
            self.down_proj.stack(),
            layer=row,
            kernels=kernels,
            differentiable=differentiable,
        )
        if self.config.n_shared_experts:
            routed = routed + self.shared_experts(row, x).astype(jnp.float32)
        return routed.astype(x.dtype)


def _bits(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.bits(key, shape, jnp.uint32).astype(dtype)


def _scales(inner: int):
    # Random nibbles have a standard deviation of about 4.6: weights get variance 1 / inner.
    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        spread = jax.random.uniform(key, shape, jnp.float32, 0.5, 1.5)
        return (spread * inner**-0.5 / 4.6).astype(dtype)

    return init
