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
from k26jax.model.layers import flat, rope_tables, summed_dense
from k26jax.model.mlp import SwiGLU
from k26jax.model.parameters import Source, declare, ones
from k26jax.pallas.dense import dense
from k26jax.pallas.draft_attention import draft_attention
from k26jax.pallas.norm import add_rms_norm, head_norm, rms_norm
from k26jax.sharding.collectives import own_columns
from k26jax.sharding.rules import MODEL


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
        self.k_proj = weight("self_attn.k_proj", (key, hidden), ("kv_head", "hidden"))
        self.v_proj = weight("self_attn.v_proj", (key, hidden), ("kv_head", "hidden"))
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

    def context(
        self, features: Float[Array, "*rows features"], kernels: str = "reference"
    ) -> Float[Array, "*rows d"]:
        """Returns the context states of target features, of which ranks may have parts each."""
        rows, weights = flat(features.astype(self.dtype)), self.fc[...][None]
        inputs = rows.shape[-1]
        if weights.shape[-1] < inputs:
            rows = own_columns(rows, MODEL)
        projected = summed_dense(rows, weights, layer=0, inputs=inputs, kernels=kernels)
        projected = projected.astype(self.dtype)
        normed = self._norm(projected, self.hidden_norm[...][None], 0, kernels)
        return normed.reshape(*features.shape[:-1], -1)

    def context_rows(
        self,
        features: Float[Array, "slot s features"],
        positions: Int32[Array, "slot s"],
        kernels: str = "reference",
    ) -> DraftCache:
        """Returns the cache rows of committed tokens, from target features alone."""
        context = flat(self.context(features, kernels))
        tables = self.tables(positions)
        shape = (*positions.shape, -1, self.config.head_dim)
        weights = self.k_proj[...], self.v_proj[...]
        rows = []
        for layer in range(self.config.num_hidden_layers):
            keys, values = dense(context, weights, layer=layer, kernels=kernels)
            keys = self._rotated(keys, self.k_norm[...], layer, tables, kernels)
            rows.append((keys.reshape(shape), values.reshape(shape)))
        return DraftCache(
            jnp.stack([keys for keys, _ in rows]), jnp.stack([values for _, values in rows])
        )

    def block(
        self,
        embeddings: Float[Array, "slot t d"],
        cache: DraftCache,
        lengths: Int32[Array, "slot"],
        kernels: str = "reference",
    ) -> Float[Array, "slot t d"]:
        """Returns the final-normed states of a block that starts at `lengths`.

        Args:
          embeddings: target embeddings of the anchor and the mask tokens.
          lengths: context rows in use; the anchor's position.
        """
        shape = embeddings.shape
        tables = self.tables(lengths[:, None] + jnp.arange(shape[1]))
        x, change = flat(embeddings), None
        for layer in range(self.config.num_hidden_layers):
            x, normed = self._norms(x, change, self.input_layernorm[...], layer, kernels)
            change = self._attend(layer, normed, tables, shape[:2], cache, lengths, kernels)
            x, normed = self._norms(x, change, self.post_attention_layernorm[...], layer, kernels)
            change = self.mlp(layer, normed, kernels)
        return self._norms(x, change, self.norm[...][None], 0, kernels)[1].reshape(shape)

    def _attend(
        self,
        layer: int,
        x: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        shape: tuple[int, ...],
        cache: DraftCache,
        lengths: jax.Array,
        kernels: str,
    ) -> jax.Array:
        """Returns the attention block's output for normed rows x [n, d] of blocks of `shape`."""
        config = self.config
        query, keys, values = (
            rows.reshape(*shape, *rows.shape[1:])
            for rows in self.project(layer, x, tables, kernels)
        )
        attended = draft_attention(
            query,
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
        heads = attended.reshape(x.shape[0], -1)
        inputs = config.num_attention_heads * config.head_dim
        return summed_dense(heads, self.o_proj[...], layer=layer, inputs=inputs, kernels=kernels)

    def project(
        self, layer: int, x: jax.Array, tables: tuple[jax.Array, jax.Array], kernels: str
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values [n, heads, width] of normed rows x [n, d]."""
        weights = self.q_proj[...], self.k_proj[...], self.v_proj[...]
        query, keys, values = dense(x, weights, layer=layer, kernels=kernels)
        query = self._rotated(query, self.q_norm[...], layer, tables, kernels)
        keys = self._rotated(keys, self.k_norm[...], layer, tables, kernels)
        return query, keys, values.reshape(keys.shape)

    def _rotated(
        self,
        rows: jax.Array,
        gains: jax.Array,
        layer: int,
        tables: tuple[jax.Array, jax.Array],
        kernels: str,
    ) -> jax.Array:
        heads = rows.reshape(rows.shape[0], -1, self.config.head_dim)
        eps = self.config.rms_norm_eps
        return head_norm(heads, gains, *tables, layer=layer, eps=eps, kernels=kernels)

    def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns cos and sin [n, width / 2] of positions of any shape, one row each."""
        return rope_tables(positions.reshape(-1), self.config.rope, self.config.head_dim)

    def _norm(self, x: jax.Array, gains: jax.Array, layer: int, kernels: str) -> jax.Array:
        return rms_norm(x, gains, layer=layer, eps=self.config.rms_norm_eps, kernels=kernels)

    def _norms(
        self, x: jax.Array, change: jax.Array | None, gains: jax.Array, layer: int, kernels: str
    ) -> tuple[jax.Array, jax.Array]:
        """Returns x + change, and that normed."""
        if change is None:
            return x, self._norm(x, gains, layer, kernels)
        eps = self.config.rms_norm_eps
        return add_rms_norm(x, change, gains, layer=layer, eps=eps, kernels=kernels)
