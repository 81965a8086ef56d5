"""The drafter as it is trained: many blocks of one sequence at once, differentiable."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k26jax.model.cache import DraftCache
from k26jax.model.drafter import Drafter
from k26jax.model.layers import contract, linear, rms_norm


class TrainingDrafter(Drafter):
    """The drafter with the same parameters and arithmetic, its attention behind a dense mask."""

    def blocks(self, embeddings: jax.Array, features: jax.Array, anchors: jax.Array) -> jax.Array:
        """Returns the final-normed states [b, a, t, d] of blocks that see features before them.

        Args:
          embeddings: [b, a, t, d], the anchor's and the masks'.
          features: target features of whole sequences, [b, s, n * d].
          anchors: int32 [b, a], positions; block a sees the features at earlier positions only.
        """
        config, eps = self.config, self.config.rms_norm_eps
        batch, n_blocks, rows, hidden = embeddings.shape
        length = features.shape[1]
        everywhere = jnp.broadcast_to(jnp.arange(length), (batch, length))
        context = self.context_rows(features, everywhere)
        seen = jnp.arange(length) < anchors[..., None]
        positions = (anchors[..., None] + jnp.arange(rows)).reshape(batch, -1)
        x = embeddings.reshape(batch, n_blocks * rows, hidden)
        for layer in range(config.num_hidden_layers):
            normed = rms_norm(x, self.input_layernorm[layer], eps)
            attended = self._attend(layer, normed, positions, context, seen)
            x = x + linear(attended.reshape(batch, n_blocks * rows, -1), self.o_proj[layer])
            normed = rms_norm(x, self.post_attention_layernorm[layer], eps)
            x = x + self.mlp(layer, normed)
        return rms_norm(x, self.norm[...], eps).reshape(embeddings.shape)

    def _attend(
        self,
        layer: int,
        x: jax.Array,
        positions: jax.Array,
        context: DraftCache,
        seen: jax.Array,
    ) -> jax.Array:
        batch, n_blocks, length = seen.shape
        kv_heads, width = self.config.num_key_value_heads, self.config.head_dim
        group = self.config.num_attention_heads // kv_heads
        shape = (batch, n_blocks, -1, kv_heads)
        rows = x.reshape(-1, x.shape[-1])
        query, keys, values = self.project(layer, rows, self.tables(positions), "reference")
        query = query.reshape(batch, n_blocks, -1, kv_heads, group, width)
        keys, values = (part.reshape(*shape, width) for part in (keys, values))
        before = contract("batnge,bsne->bangts", query, context.keys[layer])
        before = jnp.where(seen[:, :, None, None, None], before, -jnp.inf)
        within = contract("batnge,bajne->bangtj", query, keys)
        scores = jnp.concatenate([before, within], axis=-1) * width**-0.5
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        return contract("bangts,bsne->batnge", weights[..., :length], context.values[layer]).astype(
            x.dtype
        ) + contract("bangtj,bajne->batnge", weights[..., length:], values).astype(x.dtype)
