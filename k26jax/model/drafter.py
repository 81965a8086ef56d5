"""The DFlash block drafter: a few decoder layers that read the target's hidden states.

One pass over [anchor, mask, mask, ...] predicts a whole block. Keys and values of committed tokens
come straight from target features and are cached; the block's own are never kept.
Source: DFlash (arXiv 2602.06036) and its published drafter folders.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from k26jax.config import DraftConfig
from k26jax.model.cache import DraftCache
from k26jax.model.layers import linear, rms_norm, rope_tables, rotate
from k26jax.model.mlp import SwiGLU
from k26jax.model.parameters import Source, declare, ones
from k26jax.pallas.draft_attention import draft_attention


class Drafter(nnx.Module):
    """A DFlash drafter with layer-stacked parameters; embedding and head are the target's."""

    def __init__(self, config: DraftConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.dtype = dtype
        hidden, layers = config.hidden_size, tuple(range(config.num_hidden_layers))
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim

        def weight(name: str, shape: tuple[int, ...], axes: tuple[str, ...], init: Any = None):
            source = Source(f"layers.{{layer}}.{name}.weight", layers=layers)
            stacked = (len(layers), *shape)
            return declare(rngs, stacked, ("layer", *axes), source, dtype=dtype, init=init)

        features = len(config.target_layer_ids) * hidden
        self.fc = declare(
            rngs, (hidden, features), ("hidden", "feature"), Source("fc.weight"), dtype=dtype
        )
        self.hidden_norm = declare(
            rngs, (hidden,), ("hidden",), Source("hidden_norm.weight"), dtype=dtype, init=ones
        )
        self.input_layernorm = weight("input_layernorm", (hidden,), ("hidden",), ones)
        self.q_proj = weight("self_attn.q_proj", (query, hidden), ("head", "hidden"))
        self.k_proj = weight("self_attn.k_proj", (key, hidden), ("head", "hidden"))
        self.v_proj = weight("self_attn.v_proj", (key, hidden), ("head", "hidden"))
        self.o_proj = weight("self_attn.o_proj", (hidden, query), ("hidden", "head"))
        self.q_norm = weight("self_attn.q_norm", (config.head_dim,), ("head_dim",), ones)
        self.k_norm = weight("self_attn.k_norm", (config.head_dim,), ("head_dim",), ones)
        self.post_attention_layernorm = weight(
            "post_attention_layernorm", (hidden,), ("hidden",), ones
        )
        self.mlp = SwiGLU(
            hidden,
            config.intermediate_size,
            layers,
            "layers.{layer}.mlp",
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = declare(
            rngs, (hidden,), ("hidden",), Source("norm.weight"), dtype=dtype, init=ones
        )

    def context(self, features: Float[Array, "*rows features"]) -> Float[Array, "*rows d"]:
        """Returns the context states of target features."""
        projected = linear(features.astype(self.dtype), self.fc[...])
        return rms_norm(projected, self.hidden_norm[...], self.config.rms_norm_eps)

    def context_rows(
        self, features: Float[Array, "slot s features"], positions: Int32[Array, "slot s"]
    ) -> DraftCache:
        """Returns the cache rows of committed tokens, from target features alone."""
        context = self.context(features)
        rows = [
            self._keys_values(layer, context, positions)
            for layer in range(self.config.num_hidden_layers)
        ]
        return DraftCache(
            jnp.stack([keys for keys, _ in rows]), jnp.stack([values for _, values in rows])
        )

    def block(
        self,
        embeddings: Float[Array, "slot t d"],
        cache: DraftCache,
        lengths: Int32[Array, "slot"],
        kernels: str = "auto",
    ) -> Float[Array, "slot t d"]:
        """Returns the final-normed states of a block that starts at `lengths`.

        Args:
          embeddings: target embeddings of the anchor and the mask tokens.
          lengths: context rows in use; the anchor's position.
        """
        config = self.config
        positions = lengths[:, None] + jnp.arange(embeddings.shape[1])
        x = embeddings
        for layer in range(config.num_hidden_layers):
            normed = rms_norm(x, self.input_layernorm[layer], config.rms_norm_eps)
            keys, values = self._keys_values(layer, normed, positions)
            attended = draft_attention(
                self._queries(layer, normed, positions),
                cache.keys,
                cache.values,
                keys,
                values,
                layer=layer,
                lengths=lengths,
                window=config.windows[layer],
                causal=config.causal[layer],
                scale=config.head_dim**-0.5,
                kernels=kernels,
            ).astype(x.dtype)
            x = x + linear(attended.reshape(*x.shape[:-1], -1), self.o_proj[layer])
            normed = rms_norm(x, self.post_attention_layernorm[layer], config.rms_norm_eps)
            x = x + self.mlp(layer, normed)
        return rms_norm(x, self.norm[...], config.rms_norm_eps)

    def _queries(self, layer: int, x: jax.Array, positions: jax.Array) -> jax.Array:
        heads = linear(x, self.q_proj[layer])
        return self._normed_rotated(heads, self.q_norm[layer], positions)

    def _keys_values(
        self, layer: int, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        keys = linear(x, self.k_proj[layer])
        values = linear(x, self.v_proj[layer])
        heads = (*x.shape[:-1], self.config.num_key_value_heads, self.config.head_dim)
        return self._normed_rotated(keys, self.k_norm[layer], positions), values.reshape(heads)

    def _normed_rotated(self, x: jax.Array, gain: jax.Array, positions: jax.Array) -> jax.Array:
        config = self.config
        heads = x.reshape(*x.shape[:-1], -1, config.head_dim)
        cos, sin = rope_tables(positions, config.rope, config.head_dim)
        normed = rms_norm(heads, gain, config.rms_norm_eps)
        return rotate(normed, cos[..., None, :], sin[..., None, :], interleaved=False)
