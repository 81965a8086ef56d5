"""The target model: embedding, decoder layers, head; over a latent cache or without one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from k26jax.config import ModelConfig
from k26jax.model.layers import rms_norm
from k26jax.model.mla import MLA, Context
from k26jax.model.mlp import SwiGLU
from k26jax.model.moe import MoE
from k26jax.model.parameters import Source, declare, ones
from k26jax.pallas.products import contract

Attend = Callable[[int, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What a forward pass leaves of its rows, before any of them is committed.

    hidden: after the final norm; the head's input.
    c_kv, k_pe: the cache rows of these tokens.
    features: outputs of the tapped layers side by side, in the order asked for.
    """

    hidden: Float[Array, "b t d"]
    c_kv: Float[Array, "l b t c"]
    k_pe: Float[Array, "l b t r"]
    features: Float[Array, "b t features"]


class Target(nnx.Module):
    """A DeepSeek-V3 style decoder with layer-stacked parameters."""

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.dtype = dtype
        hidden, layers = config.hidden_size, tuple(range(config.num_hidden_layers))
        table = (config.vocab_size, hidden)

        def norm(name: str):
            source = Source(f"model.layers.{{layer}}.{name}.weight", layers=layers)
            shape = (len(layers), hidden)
            return declare(rngs, shape, ("layer", "hidden"), source, dtype=dtype, init=ones)

        self.embed_tokens = declare(
            rngs, table, ("vocab", "hidden"), Source("model.embed_tokens.weight"), dtype=dtype
        )
        self.input_layernorm = norm("input_layernorm")
        self.self_attn = MLA(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        if config.dense_layer_ids:
            self.mlp = SwiGLU(
                hidden,
                config.intermediate_size,
                config.dense_layer_ids,
                "model.layers.{layer}.mlp",
                dtype=dtype,
                rngs=rngs,
            )
        if config.moe_layer_ids:
            self.moe = MoE(config, dtype=dtype, rngs=rngs)
        self.norm = declare(
            rngs, (hidden,), ("hidden",), Source("model.norm.weight"), dtype=dtype, init=ones
        )
        if not config.tie_word_embeddings:
            self.lm_head = declare(
                rngs, table, ("vocab", "hidden"), Source("lm_head.weight"), dtype=dtype
            )

    def embed(self, token_ids: Int[Array, "*rows"]) -> Float[Array, "*rows d"]:
        """Returns the embeddings of token ids."""
        return self.embed_tokens[...][token_ids].astype(self.dtype)

    def logits(self, hidden: Float[Array, "*rows d"]) -> Float32[Array, "*rows w"]:
        """Returns the logits of final-normed hidden states."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return contract("...d,wd->...w", hidden, head[...].astype(hidden.dtype))

    def forward(
        self,
        token_ids: Int32[Array, "b t"],
        positions: Int32[Array, "b t"],
        context: Context,
        *,
        valid: Bool[Array, "b t"],
        taps: tuple[int, ...] = (),
        kernels: str = "auto",
    ) -> Rows:
        """Returns the new rows of tokens that attend to the cache and to each other.

        Args:
          valid: other rows use no expert and their results mean nothing.
          taps: layers whose output goes to `features`.
        """
        latents: list[tuple[jax.Array, jax.Array]] = []

        def attend(layer: int, x: jax.Array) -> jax.Array:
            out, c_kv, k_pe = self.self_attn.absorbed(layer, x, positions, context, kernels)
            latents.append((c_kv, k_pe))
            return out

        hidden, outputs = self._run_layers(token_ids, attend, valid, kernels)
        features = [self._tap(layer, outputs, hidden) for layer in taps]
        empty = jnp.zeros((*token_ids.shape, 0), self.dtype)
        return Rows(
            hidden,
            jnp.stack([c_kv for c_kv, _ in latents]),
            jnp.stack([k_pe for _, k_pe in latents]),
            jnp.concatenate(features, axis=-1) if features else empty,
        )

    def forward_expanded(
        self,
        token_ids: Int32[Array, "b t"],
        positions: Int32[Array, "#b t"],
        visible: Bool[Array, "#b t t"],
    ) -> tuple[Float[Array, "b t d"], list[Float[Array, "b t d"]]]:
        """Returns the final-normed hidden states and every layer's output, without a cache.

        The reference form, and the differentiable one: keys and values written out per head, every
        expert run on every row.

        Args:
          visible: which rows (last axis) each row sees.
        """

        def attend(layer: int, x: jax.Array) -> jax.Array:
            return self.self_attn.expanded(layer, x, positions, visible)

        valid = jnp.ones(token_ids.shape, bool)
        return self._run_layers(token_ids, attend, valid, "reference", differentiable=True)

    def _run_layers(
        self,
        token_ids: jax.Array,
        attend: Attend,
        valid: jax.Array,
        kernels: str,
        *,
        differentiable: bool = False,
    ) -> tuple[jax.Array, list[jax.Array]]:
        eps = self.config.rms_norm_eps
        x = self.embed(token_ids)
        outputs = []
        for layer in range(self.config.num_hidden_layers):
            with jax.named_scope(f"layer_{layer}"):
                x = x + attend(layer, rms_norm(x, self.input_layernorm[layer], eps))
                normed = rms_norm(x, self.post_attention_layernorm[layer], eps)
                x = x + self._feed_forward(layer, normed, valid, kernels, differentiable)
            outputs.append(x)
        return rms_norm(x, self.norm[...], eps), outputs

    def _feed_forward(
        self, layer: int, x: jax.Array, valid: jax.Array, kernels: str, differentiable: bool
    ) -> jax.Array:
        if layer in self.config.dense_layer_ids:
            return self.mlp(self.config.dense_layer_ids.index(layer), x)
        row = self.config.moe_layer_ids.index(layer)
        flat, flat_valid = x.reshape(-1, x.shape[-1]), valid.reshape(-1)
        return self.moe(row, flat, flat_valid, kernels, differentiable).reshape(x.shape)

    def _tap(self, layer: int, outputs: list[jax.Array], hidden: jax.Array) -> jax.Array:
        # Hugging Face's hidden_states hold the last layer's output after the final norm.
        return hidden if layer == self.config.num_hidden_layers - 1 else outputs[layer]
