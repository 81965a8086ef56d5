"""Mixture-of-experts blocks: router, routed experts (INT4 or float) and the shared expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k26jax.config import ModelConfig, Quantization
from k26jax.model.mlp import SwiGLU
from k26jax.model.parameters import Source, declare
from k26jax.pallas.dense import partial_sums
from k26jax.pallas.int4_moe import (
    BLOCK_ROWS,
    ExpertWeights,
    Shared,
    TiledExperts,
    Tiles,
    arrange,
    expert_columns,
    experts,
    prompt_block_rows,
    tiled_experts,
)
from k26jax.pallas.int4_moe.reference import GROUP_SIZE
from k26jax.pallas.router import Blocks, route_and_list
from k26jax.sharding.collectives import counted_once, rank, ranks, sum_over_ranks
from k26jax.sharding.rules import EXPERT, MODEL


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


# The two products of an expert, and the projections that each of them multiplies by.
PRODUCTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


class TiledProjections(nnx.Module):
    """The experts in the kernel's layout, made on the device from the published one."""

    def hold(self, product: str, tiles: Tiles) -> None:
        """Takes the tiles of one of `PRODUCTS`."""
        tile, step = ("ffn_tile", "step") if product == "gate_up" else ("tile", "ffn_step")
        axes = ("layer", "expert", tile, step)
        words = nnx.Param(tiles.words, axes=(*axes, "column", "lane"))
        scales = nnx.Param(tiles.scales, axes=(*axes, "half", "column"))
        setattr(self, f"{product}_words", words)
        setattr(self, f"{product}_scales", scales)

    def tiles(self) -> TiledExperts:
        """Returns the whole stacks, for the kernel to index."""
        return TiledExperts(*(self._held(product) for product in PRODUCTS))

    def _held(self, product: str) -> Tiles:
        words, scales = (getattr(self, f"{product}_{what}") for what in ("words", "scales"))
        return Tiles(words[...], scales[...])


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

    def arrange(self, products: Iterable[str] = PRODUCTS) -> None:
        """Replaces the INT4 experts by the kernel's layout of them; costs both for a moment.

        Args:
          products: which of them to replace now. The kernel runs once all are.

        Raises: KernelError if the experts have no such layout.
        """
        if not hasattr(self, "experts"):
            self.experts = TiledProjections()
        for product in products:
            stacks = {name: getattr(self, name).stack() for name in PRODUCTS[product]}
            self.experts.hold(product, arrange(stacks, expert_columns()))
            for name in stacks:
                delattr(self, name)

    def routing(self, row: int, x: jax.Array, kernels: str) -> tuple[jax.Array, jax.Array]:
        """Returns topk_ids and topk_weights [n, k] for rows x [n, d], in float32 throughout."""
        logits, _ = self.first_products(row, x, kernels)
        return self.choose(row, logits, jnp.ones(x.shape[0], bool), kernels)[:2]

    def choose(
        self,
        row: int,
        logits: jax.Array,
        valid: jax.Array,
        kernels: str,
        block_rows: int = BLOCK_ROWS,
    ) -> tuple[jax.Array, jax.Array, Blocks]:
        """Returns topk_ids and topk_weights [n, k] and the experts' work list.

        Ids count from the first expert of this rank; those of other ranks' experts, like those of
        rows that choose none, are the number of experts it has.

        Args:
          logits: the router's, float32 [part, n, e].
          valid: bool [n]; other rows choose no expert.
          block_rows: rows of a block of the list.
        """
        config = self.config
        bias = self.e_score_correction_bias[...] if config.has_selection_bias else None
        rule: dict[str, Any] = dict(
            layer=row,
            num_experts_per_tok=config.num_experts_per_tok,
            scoring_func=config.scoring_func,
            topk_method=config.topk_method,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            kernels=kernels,
        )
        held = config.n_routed_experts // ranks(EXPERT)
        here = {"first": rank(EXPERT) * held, "held": held}
        return route_and_list(logits, bias, valid, rows=block_rows, **here, **rule)

    def __call__(
        self,
        row: int,
        x: jax.Array,
        valid: jax.Array,
        kernels: str,
        differentiable: bool = False,
    ) -> jax.Array:
        """Returns the output of the stack's `row`-th block, [n, d].

        In x's dtype; the sum of several ranks in float32, for the residual sum to round.

        Args:
          x: [n, d].
          valid: bool [n]; other rows choose no expert.
          differentiable: run every expert on every row.
        """
        logits, shared = self.first_products(row, x, kernels)
        block_rows = self._block_rows(x.shape[0], kernels)
        topk_ids, topk_weights, blocks = self.choose(row, logits, valid, kernels, block_rows)
        # Of several ranks each has a part of a sum, which is rounded once, by who reads it.
        dtype = x.dtype if ranks(EXPERT) * ranks(MODEL) == 1 else jnp.float32
        if hasattr(self, "experts"):
            out = tiled_experts(
                x,
                topk_ids,
                topk_weights,
                blocks,
                self.experts.tiles(),
                layer=row,
                inner=self.config.moe_intermediate_size // ranks(MODEL),
                shared=shared,
                dtype=dtype,
                rows=block_rows,
            )
        else:
            out = experts(
                x,
                topk_ids,
                topk_weights,
                self.gate_proj.stack(),
                self.up_proj.stack(),
                self.down_proj.stack(),
                layer=row,
                shared=shared,
                dtype=dtype,
                kernels=kernels,
                differentiable=differentiable,
            )
        return sum_over_ranks(out, EXPERT, MODEL)

    def _block_rows(self, rows: int, kernels: str) -> int:
        """Returns the rows of a block: steps ask for kernels, prompts for XLA's products."""
        if kernels == "pallas":
            return BLOCK_ROWS
        return prompt_block_rows(
            rows * self.config.num_experts_per_tok, self.config.n_routed_experts
        )

    def first_products(
        self, row: int, x: jax.Array, kernels: str
    ) -> tuple[jax.Array, Shared | None]:
        """Returns router logits, float32 [part, n, e], and what the shared expert has so far."""
        options = {"layer": row, "kernels": kernels}
        if not self.config.n_shared_experts:
            return partial_sums(x, (self.gate[...],), **options)[0], None
        shared = self.shared_experts
        weights = shared.gate_proj[...], shared.up_proj[...], self.gate[...]
        gate, up, logits = partial_sums(x, weights, **options)
        # Ranks of `expert` have the same part of it; of a gate of zero SwiGLU is zero.
        return logits, Shared(counted_once(gate, EXPERT), up, shared.down_proj[...])


def _bits(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.bits(key, shape, jnp.uint32).astype(dtype)


def _scales(inner: int):
    # Random nibbles have a standard deviation of about 4.6: weights get variance 1 / inner.
    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        spread = jax.random.uniform(key, shape, jnp.float32, 0.5, 1.5)
        return (spread * inner**-0.5 / 4.6).astype(dtype)

    return init
