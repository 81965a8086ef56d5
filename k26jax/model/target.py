"""The target model: embedding, decoder layers, head; over a latent cache or without one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from k26jax.config import ModelConfig
from k26jax.model.layers import flat
from k26jax.model.mla import MLA, Context
from k26jax.model.mlp import SwiGLU
from k26jax.model.moe import PRODUCTS, MoE
from k26jax.model.parameters import Params, Source, arrays, bind, declare, ones
from k26jax.model.prompt import PromptContext
from k26jax.pallas.dense import dense
from k26jax.pallas.norm import add_rms_norm, rms_norm
from k26jax.sharding.collectives import take_rows
from k26jax.sharding.rules import MODEL

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


def arrangement(
    module: "Target", products: Iterable[str] = PRODUCTS
) -> tuple["Target", Callable[[Params], Params]]:
    """Returns the (abstract) target with experts in the kernel's layout, and what makes it.

    Args:
      products: those of the experts' products to lay out.

    Raises: KernelError if the experts have no such layout.
    """

    def arrange(params: Params) -> Target:
        target = bind(module, params)
        target.moe.arrange(products)
        return target

    return nnx.eval_shape(arrange, arrays(module)), lambda params: arrays(arrange(params))


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
        return take_rows(self.embed_tokens[...], token_ids, MODEL).astype(self.dtype)

    def logits(
        self, hidden: Float[Array, "*rows d"], kernels: str = "reference"
    ) -> Float32[Array, "*rows w"]:
        """Returns the logits of final-normed hidden states, on each rank those of its tokens."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        (logits,) = dense(
            flat(hidden), (head[...][None],), layer=0, dtypes=(jnp.float32,), kernels=kernels
        )
        return logits.reshape(*hidden.shape[:-1], -1)

    def forward(
        self,
        token_ids: Int32[Array, "b t"],
        positions: Int32[Array, "b t"],
        context: Context | PromptContext,
        *,
        valid: Bool[Array, "b t"],
        taps: tuple[int, ...] = (),
        kernels: str = "reference",
    ) -> Rows:
        """Returns the new rows of tokens that attend to the cache and to each other.

        Args:
          valid: other rows use no expert and their results mean nothing.
          taps: layers whose output goes to `features`.
        """
        latents: list[tuple[jax.Array, jax.Array]] = []
        tables = self.self_attn.tables(positions)

        def attend(layer: int, x: jax.Array) -> jax.Array:
            out, c_kv, k_pe = self.self_attn.absorbed(layer, x, tables, context, kernels)
            latents.append((c_kv, k_pe))
            return out

        hidden, outputs = self._run_layers(token_ids, attend, valid, kernels)
        features = [self._tap(layer, outputs, hidden) for layer in taps]
        rows = Rows(
            hidden,
            jnp.stack([c_kv for c_kv, _ in latents]),
            jnp.stack([k_pe for _, k_pe in latents]),
            jnp.concatenate([hidden[:, :0], *features], axis=-1),
        )
        shape = token_ids.shape
        return jax.tree.map(lambda x: x.reshape(*x.shape[:-2], *shape, x.shape[-1]), rows)

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

        shape = (*token_ids.shape, self.config.hidden_size)

        def attend(layer: int, x: jax.Array) -> jax.Array:
            return flat(self.self_attn.expanded(layer, x.reshape(shape), positions, visible))

        valid = jnp.ones(token_ids.shape, bool)
        hidden, outputs = self._run_layers(
            token_ids, attend, valid, "reference", differentiable=True
        )
        return hidden.reshape(shape), [out.reshape(shape) for out in outputs]

    def _run_layers(
        self,
        token_ids: jax.Array,
        attend: Attend,
        valid: jax.Array,
        kernels: str,
        *,
        differentiable: bool = False,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the rows [n, d] behind the final norm, and behind every layer."""
        x, change = flat(self.embed(token_ids)), None
        outputs = []
        for layer in range(self.config.num_hidden_layers):
            with jax.named_scope(f"layer_{layer}"):
                x, normed = self._norm(x, change, self.input_layernorm[...], layer, kernels)
                if layer:
                    outputs.append(x)
                change = attend(layer, normed)
                x, normed = self._norm(
                    x, change, self.post_attention_layernorm[...], layer, kernels
                )
                change = self._feed_forward(layer, normed, valid, kernels, differentiable)
        x, hidden = self._norm(x, change, self.norm[...][None], 0, kernels)
        return hidden, [*outputs, x]

    def _norm(
        self, x: jax.Array, change: jax.Array | None, gains: jax.Array, layer: int, kernels: str
    ) -> tuple[jax.Array, jax.Array]:
        """Returns x + change, and that normed.

        Both behind a barrier: XLA otherwise merges the sums of several layers, or does not where a
        drafter reads them, and a prefill with a drafter leaves other bits than one without.
        """
        norm = {"layer": layer, "eps": self.config.rms_norm_eps, "kernels": kernels}
        if change is None:
            return x, rms_norm(x, gains, **norm)
        return lax.optimization_barrier(add_rms_norm(x, change, gains, **norm))

    def _feed_forward(
        self, layer: int, x: jax.Array, valid: jax.Array, kernels: str, differentiable: bool
    ) -> jax.Array:
        if layer in self.config.dense_layer_ids:
            return self.mlp(self.config.dense_layer_ids.index(layer), x, kernels)
        row = self.config.moe_layer_ids.index(layer)
        return self.moe(row, x, valid.reshape(-1), kernels, differentiable)

    def _tap(self, layer: int, outputs: list[jax.Array], hidden: jax.Array) -> jax.Array:
        # Hugging Face's hidden_states hold the last layer's output after the final norm.
        return hidden if layer == self.config.num_hidden_layers - 1 else outputs[layer]
