"""The target as the training scripts run it: float experts, every one on every row, no cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k26jax.checkpoint.load import load_params
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.config import ModelConfig, Quantization
from k26jax.model.layers import contract, linear, rms_norm
from k26jax.model.parameters import Params, abstract
from k26jax.model.target import Target
from k26jax.pallas.int4_moe.reference import GROUP_SIZE, decode_int4

EXPERTS = ("gate_proj", "up_proj", "down_proj")


class Forward(NamedTuple):
    """hidden: [b, t, d]. outputs: [b, t, d] of every layer. loads: [moe layers, e], rows a expert.

    The head's input, what a drafter taps, and what the selection bias balances.
    """

    hidden: jax.Array
    outputs: list[jax.Array]
    loads: jax.Array


class TrainingTarget(Target):
    """The target with the same parameters and arithmetic, arranged for large batches.

    The experts' shares are applied before the down projection, so that a row's outputs of all
    experts are never written out; attention may use cuDNN's fused kernel.
    """

    def run(self, token_ids: jax.Array, attention: str) -> Forward:
        """Returns the states of whole sequences [b, t] that start at position 0.

        Args:
          attention: "cudnn", or "package" for the package's expanded form.
        """
        batch, length = token_ids.shape
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        visible = jnp.broadcast_to(
            jnp.tril(jnp.ones((length, length), bool)), (batch, *[length] * 2)
        )
        eps = self.config.rms_norm_eps
        x = self.embed(token_ids)
        outputs, loads = [], []
        for layer in range(self.config.num_hidden_layers):
            normed = rms_norm(x, self.input_layernorm[layer], eps)
            if attention == "cudnn":
                x = x + self._fused(layer, normed, positions)
            else:
                x = x + self.self_attn.expanded(layer, normed, positions, visible)
            normed = rms_norm(x, self.post_attention_layernorm[layer], eps)
            if layer in self.config.dense_layer_ids:
                x = x + self.mlp(self.config.dense_layer_ids.index(layer), normed)
            else:
                row = self.config.moe_layer_ids.index(layer)
                out, load = self._experts(row, normed.reshape(-1, normed.shape[-1]))
                x = x + out.reshape(x.shape)
                loads.append(load)
            outputs.append(x)
        return Forward(rms_norm(x, self.norm[...], eps), outputs, jnp.stack(loads))

    def _fused(self, layer: int, x: jax.Array, positions: jax.Array) -> jax.Array:
        config, mla = self.config, self.self_attn
        q_nope, q_pe, c_kv, k_pe = mla.heads(layer, x, positions)
        w_uk, w_uv = jnp.split(mla.kv_b_proj[layer].astype(x.dtype), [q_nope.shape[-1]], axis=1)
        k_nope = contract("bsc,hnc->bshn", c_kv, w_uk).astype(x.dtype)
        values = contract("bsc,hvc->bshv", c_kv, w_uv).astype(x.dtype)
        shared = jnp.broadcast_to(k_pe[:, :, None], q_pe.shape)
        query = jnp.concatenate([q_nope, q_pe], axis=-1)
        keys = jnp.concatenate([k_nope, shared], axis=-1)
        pad = [(0, 0)] * 3 + [(0, query.shape[-1] - values.shape[-1])]
        attended = jax.nn.dot_product_attention(
            query,
            keys,
            jnp.pad(values, pad),
            scale=config.softmax_scale,
            is_causal=True,
            implementation="cudnn",
        )
        heads = attended[..., : config.v_head_dim].reshape(*x.shape[:-1], -1)
        return linear(heads, mla.o_proj[layer])

    def _feed_forward(
        self, layer: int, x: jax.Array, valid: jax.Array, kernels: str, differentiable: bool
    ) -> jax.Array:
        if layer in self.config.dense_layer_ids:
            return super()._feed_forward(layer, x, valid, kernels, differentiable)
        row = self.config.moe_layer_ids.index(layer)
        return self._experts(row, x.reshape(-1, x.shape[-1]))[0].reshape(x.shape)

    def _experts(self, row: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        moe, n_experts = self.moe, self.config.n_routed_experts
        topk_ids, topk_weights = moe.routing(row, x, "reference")
        chosen = topk_ids[..., None] == jnp.arange(n_experts)
        share = (chosen * topk_weights[..., None]).sum(axis=1)
        gate, up, down = (getattr(moe, name).weight[row].astype(x.dtype) for name in EXPERTS)

        def product(weight: jax.Array) -> jax.Array:
            out = jnp.einsum("ni,eoi->neo", x, weight, preferred_element_type=x.dtype)
            return out.astype(jnp.float32)

        hidden = (jax.nn.silu(product(gate)) * product(up) * share[..., None]).astype(x.dtype)
        out = jnp.einsum("neo,eio->ni", hidden, down, preferred_element_type=x.dtype)
        return out + moe.shared_experts(row, x), chosen.sum(axis=(0, 1))


def training_config(config: ModelConfig) -> ModelConfig:
    """Returns the configuration of the same model with float experts."""
    return dataclasses.replace(config, quantization=Quantization.NONE)


def fake_int4(weight: jax.Array) -> jax.Array:
    """Returns the weight as its INT4 form stores it (`quantize_int4`'s rule), float32.

    The gradient passes straight through to the weight.
    """
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP_SIZE)
    scale = (jnp.abs(groups).max(axis=-1, keepdims=True) / 7.5).astype(jnp.bfloat16)
    scale = scale.astype(jnp.float32)
    divisor = jnp.where(scale == 0, 1.0, scale)
    stored = jnp.clip(jnp.round(groups / divisor), -8, 7) * scale
    return weight + lax.stop_gradient(stored.reshape(weight.shape) - weight)


def with_experts(params: Params, change: Any) -> Params:
    """Returns the parameters with each expert projection's dict replaced by `change` of it."""
    moe = {name: change(leaf) if name in EXPERTS else leaf for name, leaf in params["moe"].items()}
    return {**params, "moe": moe}


def fake_quantized(params: Params) -> Params:
    """Returns the parameters with the routed experts as INT4 would store them."""
    return with_experts(params, lambda leaf: {"weight": fake_int4(leaf["weight"])})


def load_for_training(folder: Path, dtype: Any) -> tuple[TrainingTarget, Params]:
    """Returns an abstract TrainingTarget and an INT4 folder's parameters, experts decoded."""
    config = ModelConfig.from_folder(folder)
    stored = abstract(lambda rngs: Target(config, dtype=dtype, rngs=rngs))
    params = load_params(open_checkpoint(folder), stored)

    def decode(leaf: dict[str, jax.Array]) -> dict[str, jax.Array]:
        packed, scale = leaf["weight_packed"], leaf["weight_scale"]
        return {"weight": decode_int4(packed, scale, packed.shape[-1] * 8, dtype)}

    floating = training_config(config)
    module = abstract(lambda rngs: TrainingTarget(floating, dtype=dtype, rngs=rngs))
    return module, jax.jit(lambda p: with_experts(p, decode))(params)


def choose_attention(requested: str) -> str:
    """Returns the attention form to use: cuDNN's where asked for and a small trial agrees."""
    if requested != "auto" or jax.default_backend() != "gpu":
        return "package" if requested == "auto" else requested
    query = jax.random.normal(jax.random.key(0), (2, 128, 4, 48), jnp.bfloat16)

    def total(q: jax.Array, implementation: Any) -> jax.Array:
        out = jax.nn.dot_product_attention(
            q, q[::-1], q * 0.5, is_causal=True, implementation=implementation
        )
        return (out.astype(jnp.float32) ** 2).sum()

    try:
        fused, plain = (
            jax.jit(jax.grad(lambda q, name=name: total(q, name)))(query).astype(jnp.float32)
            for name in ("cudnn", "xla")
        )
        difference = float(jnp.abs(fused - plain).max() / jnp.abs(plain).max())
    except Exception as error:
        print(f"cuDNN attention is not usable ({str(error)[:200]}); the package's form is used")
        return "package"
    print(f"cuDNN attention differs by {difference:.4f} of the largest gradient", flush=True)
    return "cudnn" if difference < 0.03 else "package"
