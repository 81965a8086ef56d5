"""Multi-head latent attention, in the expanded form (reference) and absorbed over the cache.

Source: DeepSeek-V2 (section 2.1), DeepSeek-V3; formulas 5 to 18 of the K2.6 block.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from k26jax.config import ModelConfig
from k26jax.model.cache import LatentCache
from k26jax.model.layers import contract, flat, linear, rope_tables, summed_dense
from k26jax.model.parameters import Source, declare, ones
from k26jax.model.prompt import PromptContext
from k26jax.pallas.dense import absorb, dense, partial_sums, values
from k26jax.pallas.norm import latent
from k26jax.pallas.norm.reference import rotate_heads
from k26jax.pallas.tree_mla import tree_mla


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What new rows may look at: the cache, and each other.

    cache: the whole latent cache.
    slots: the cache slot of each sequence.
    lengths: cache rows in use; all are visible to every row.
    ancestors: bit j of row t: row t sees new row j.
    """

    cache: LatentCache
    slots: Int32[Array, "b"]
    lengths: Int32[Array, "b"]
    ancestors: UInt32[Array, "b t words"]

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences, and new rows of each."""
        return self.ancestors.shape[0], self.ancestors.shape[1]

    def attend(
        self,
        layer: int,
        q_latent: Float[Array, "b t h c"],
        q_pe: Float[Array, "b t h r"],
        c_kv: Float[Array, "b t c"],
        k_pe: Float[Array, "b t r"],
        *,
        scale: float,
        kernels: str,
    ) -> Float32[Array, "b t h c"]:
        """Returns the attended latents of new rows, whose own latents and keys are given."""
        return tree_mla(
            q_latent,
            q_pe,
            self.cache.c_kv,
            self.cache.k_pe,
            c_kv,
            k_pe,
            layer=layer,
            slots=self.slots,
            lengths=self.lengths,
            ancestors=self.ancestors,
            scale=scale,
            kernels=kernels,
        )


class MLA(nnx.Module):
    """The attention blocks of all layers, stacked on a leading layer axis."""

    def __init__(self, config: ModelConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        n_layers, hidden = config.num_hidden_layers, config.hidden_size
        heads, latent = config.num_attention_heads, config.kv_lora_rank
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        value = config.v_head_dim

        def weight(name: str, shape: tuple[int, ...], axes: tuple[str, ...], **kwargs: Any):
            published = kwargs.pop("published_shape", None)
            source = Source(
                f"model.layers.{{layer}}.self_attn.{name}.weight",
                layers=tuple(range(n_layers)),
                published_shape=published,
            )
            return declare(
                rngs, (n_layers, *shape), ("layer", *axes), source, dtype=dtype, **kwargs
            )

        rank = config.q_lora_rank
        query = heads * (nope + rope)
        if rank is None:
            self.q_proj = weight("q_proj", (query, hidden), ("head", "hidden"))
        else:
            self.q_a_proj = weight("q_a_proj", (rank, hidden), ("q_latent", "hidden"))
            self.q_a_layernorm = weight("q_a_layernorm", (rank,), ("q_latent",), init=ones)
            self.q_b_proj = weight("q_b_proj", (query, rank), ("head", "q_latent"))
        self.kv_a_proj_with_mqa = weight(
            "kv_a_proj_with_mqa", (latent + rope, hidden), ("latent", "hidden")
        )
        self.kv_a_layernorm = weight("kv_a_layernorm", (latent,), ("latent",), init=ones)
        self.kv_b_proj = weight(
            "kv_b_proj",
            (heads, nope + value, latent),
            ("head", "nope_value", "latent"),
            published_shape=(heads * (nope + value), latent),
        )
        self.o_proj = weight("o_proj", (hidden, heads * value), ("hidden", "head"))

    def tables(self, positions: Int32[Array, "..."]) -> tuple[jax.Array, jax.Array]:
        """Returns cos and sin [n, r / 2] of positions of any shape, one row each."""
        return rope_tables(positions.reshape(-1), self.config.rope, self.config.qk_rope_head_dim)

    def project(
        self,
        layer: int,
        x: Float[Array, "row d"],
        tables: tuple[jax.Array, jax.Array],
        kernels: str,
    ) -> tuple[Float[Array, "row h qk"], Float[Array, "row c"], Float[Array, "row r"]]:
        """Returns the queries, not rotated yet, c_kv and k_pe.

        Args:
          x: normed hidden states.
          tables: cos and sin of the rows' positions.
        """
        config = self.config
        latent_norm = {
            "layer": layer,
            "eps": config.latent_norm_eps,
            "interleaved": config.rope_interleave,
            "kernels": kernels,
        }
        down = self.kv_a_proj_with_mqa[...], self.kv_a_layernorm[...]
        if config.q_lora_rank is None:
            (query,) = dense(x, (self.q_proj[...],), layer=layer, kernels=kernels)
            (compressed,) = partial_sums(x, down[:1], layer=layer, kernels=kernels)
            c_kv, k_pe = latent(compressed, down[1], *tables, **latent_norm)
        else:
            q_latent, compressed = partial_sums(
                x, (self.q_a_proj[...], down[0]), layer=layer, kernels=kernels
            )
            c_kv, k_pe, q_latent = latent(
                compressed,
                down[1],
                *tables,
                query=q_latent,
                query_gains=self.q_a_layernorm[...],
                **latent_norm,
            )
            (query,) = dense(q_latent, (self.q_b_proj[...],), layer=layer, kernels=kernels)
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return query.reshape(x.shape[0], -1, width), c_kv, k_pe

    def absorbed(
        self,
        layer: int,
        x: Float[Array, "row d"],
        tables: tuple[jax.Array, jax.Array],
        context: Context | PromptContext,
        kernels: str,
    ) -> tuple[Float[Array, "row d"], Float[Array, "row c"], Float[Array, "row r"]]:
        """Returns the block's output and the new cache rows c_kv and k_pe.

        Keys and values are never expanded: w_uk moves to the query, w_uv behind the sum.

        Args:
          x: normed hidden states, sequence by sequence.
          tables: cos and sin of the rows' positions.
        """
        config, nope = self.config, self.config.qk_nope_head_dim
        query, c_kv, k_pe = self.project(layer, x, tables, kernels)
        q_latent, q_pe = absorb(
            query,
            self.kv_b_proj[...],
            *tables,
            layer=layer,
            nope=nope,
            interleaved=config.rope_interleave,
            kernels=kernels,
        )

        def by_sequence(rows: jax.Array) -> jax.Array:
            return rows.reshape(*context.shape, *rows.shape[1:])

        attended = context.attend(
            layer,
            *map(by_sequence, (q_latent, q_pe, c_kv, k_pe)),
            scale=config.softmax_scale,
            kernels=kernels,
        )
        heads = values(
            attended.reshape(q_latent.shape),
            self.kv_b_proj[...],
            layer=layer,
            nope=nope,
            kernels=kernels,
        )
        heads = heads.reshape(x.shape[0], -1)
        inputs = config.num_attention_heads * config.v_head_dim
        out = summed_dense(heads, self.o_proj[...], layer=layer, inputs=inputs, kernels=kernels)
        return out, c_kv, k_pe

    def heads(
        self, layer: int, x: Float[Array, "b t d"], positions: Int32[Array, "#b t"]
    ) -> tuple[
        Float[Array, "b t h n"],
        Float[Array, "b t h r"],
        Float[Array, "b t c"],
        Float[Array, "b t r"],
    ]:
        """Returns q_nope, q_pe, c_kv and k_pe of normed hidden states at absolute positions."""
        config = self.config
        tables = self.tables(jnp.broadcast_to(positions, x.shape[:2]))
        query, c_kv, k_pe = self.project(layer, flat(x), tables, "reference")
        q_pe = rotate_heads(query, *tables, interleaved=config.rope_interleave)
        parts = query[..., : config.qk_nope_head_dim], q_pe, c_kv, k_pe
        q_nope, q_pe, c_kv, k_pe = (part.reshape(*x.shape[:2], *part.shape[1:]) for part in parts)
        return q_nope, q_pe, c_kv, k_pe

    def expanded(
        self,
        layer: int,
        x: Float[Array, "b t d"],
        positions: Int32[Array, "#b t"],
        visible: Bool[Array, "#b t t"],
    ) -> Float[Array, "b t d"]:
        """Returns the block's output with keys and values written out per head.

        Args:
          visible: which rows (last axis) each row sees.
        """
        q_nope, q_pe, c_kv, k_pe = self.heads(layer, x, positions)
        w_uk, w_uv = jnp.split(
            self.kv_b_proj[layer].astype(x.dtype), [self.config.qk_nope_head_dim], axis=1
        )
        k_nope = contract("bsc,hnc->bshn", c_kv, w_uk).astype(x.dtype)
        expanded_values = contract("bsc,hvc->bshv", c_kv, w_uv).astype(x.dtype)
        scores = contract("bthn,bshn->bhts", q_nope, k_nope)
        scores += contract("bthr,bsr->bhts", q_pe, k_pe)
        scores = jnp.where(visible[:, None], scores * self.config.softmax_scale, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        heads = contract("bhts,bshv->bthv", weights, expanded_values).astype(x.dtype)
        return linear(heads.reshape(*x.shape[:-1], -1), self.o_proj[layer])
