"""tree_mla in plain JAX: the meaning of the kernel.

Formulas 13 to 15 of absorbed MLA (DeepSeek-V2, section 2.1): all heads read one latent per token.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from k26jax.pallas.bits import unpack_bits
from k26jax.pallas.streaming import KEY_BLOCK, Block, streaming_attention


def tree_mla(
    q_latent: Float[Array, "b t h c"],
    q_pe: Float[Array, "b t h r"],
    cache_c_kv: Float[Array, "l slot s c"],
    cache_k_pe: Float[Array, "l slot s r"],
    tree_c_kv: Float[Array, "b t c"],
    tree_k_pe: Float[Array, "b t r"],
    *,
    layer: int | Int32[Array, ""],
    slots: Int32[Array, "b"],
    lengths: Int32[Array, "b"],
    ancestors: UInt32[Array, "b t words"],
    scale: float,
    page_table: Int32[Array, "b pages"] | None = None,
) -> Float32[Array, "b t h c"]:
    """Returns each row's attended latent.

    Row t of sequence b sees the first lengths[b] cache rows of slot slots[b], and the tree rows
    whose bit is set in ancestors[b, t]; every row sees itself. Other cache rows may hold NaN.

    Args:
      cache_c_kv, cache_k_pe: the whole stack; with a page table, its axes are layer, page, row.
      tree_c_kv, tree_k_pe: this layer's new rows.
      slots: the cache slot of each sequence; not read with a page table.
      ancestors: bit j of row t: row t sees tree row j; a parent stands before its children.
      page_table: the pages of each sequence, in order of position; sequences may share pages,
        and entries past a sequence's length may hold anything.
    """
    if page_table is not None:
        cache_c_kv, cache_k_pe = (
            _contiguous(cache, layer, page_table) for cache in (cache_c_kv, cache_k_pe)
        )
        layer, slots = 0, jnp.arange(page_table.shape[0])
    latent = q_latent.shape[-1]
    query = jnp.concatenate([q_latent, q_pe], axis=-1)[:, :, None]
    capacity = cache_c_kv.shape[2]
    size = min(KEY_BLOCK, capacity)

    def load(block: jax.Array) -> Block:
        # The last block of a capacity that is no multiple of the block size starts earlier, and
        # the rows it shares with the block before it are masked.
        first = block * size
        start = jnp.minimum(first, capacity - size)
        parts = [_rows(cache, layer, slots, start, size) for cache in (cache_c_kv, cache_k_pe)]
        keys = jnp.concatenate(parts, axis=-1)
        position = start + jnp.arange(size)
        seen = (position >= first) & (position < lengths[:, None])
        visible = jnp.broadcast_to(seen[:, None], (*query.shape[:2], size))
        return keys[:, :, None], keys[:, :, None, :latent], visible

    tree_keys = jnp.concatenate([tree_c_kv, tree_k_pe], axis=-1)
    last = (
        tree_keys[:, :, None],
        tree_keys[:, :, None, :latent],
        unpack_bits(ancestors, q_latent.shape[1]),
    )
    n_blocks = -(-lengths.max() // size)
    return streaming_attention(query, load, n_blocks, last, scale)[:, :, 0]


def _rows(
    cache: jax.Array, layer: int | jax.Array, slots: jax.Array, start: jax.Array, size: int
) -> jax.Array:
    width = cache.shape[-1]

    def one(slot: jax.Array) -> jax.Array:
        return lax.dynamic_slice(cache, (layer, slot, start, 0), (1, 1, size, width))[0, 0]

    return jax.vmap(one)(slots)


def _contiguous(cache: jax.Array, layer: int | jax.Array, page_table: jax.Array) -> jax.Array:
    """Returns one layer's pages, a sequence's in one slot: [1, b, pages * rows, width]."""
    pages = cache.at[layer, page_table].get(mode="clip")
    return pages.reshape(1, page_table.shape[0], -1, cache.shape[-1])
