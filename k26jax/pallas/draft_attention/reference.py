"""draft_attention in plain JAX: the meaning of the kernel."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.streaming import KEY_BLOCK, Block, streaming_attention


def draft_attention(
    query: Float[Array, "b t h width"],
    cache_keys: Float[Array, "l b s kv_head width"],
    cache_values: Float[Array, "l b s kv_head width"],
    block_keys: Float[Array, "b t kv_head width"],
    block_values: Float[Array, "b t kv_head width"],
    *,
    layer: int | Int32[Array, ""],
    lengths: Int32[Array, "b"],
    window: int | None,
    causal: bool,
    scale: float,
) -> Float32[Array, "b t h width"]:
    """Returns the attended values of each head.

    Block row t at position lengths[b] + t attends to the first lengths[b] cache rows of slot b and
    to the block.

    A key is seen if (not causal, or it is not later) and (no window, or it is less than `window`
    positions away; forward distance counts only where the layer is not causal).

    Args:
      cache_keys, cache_values: the whole stack; rows past the length may be NaN.
    """
    batch, rows, heads, width = query.shape
    kv_heads, capacity = block_keys.shape[2], cache_keys.shape[2]
    grouped = query.reshape(batch, rows, kv_heads, heads // kv_heads, width)
    size = min(KEY_BLOCK, capacity)
    row = jnp.arange(rows)

    def load(block: jax.Array) -> Block:
        first = block * size
        start = jnp.minimum(first, capacity - size)
        keys, values = (
            lax.dynamic_slice(cache, (layer, 0, start, 0, 0), (1, batch, size, kv_heads, width))[0]
            for cache in (cache_keys, cache_values)
        )
        position = start + jnp.arange(size)
        seen = (position >= first) & (position < lengths[:, None, None])
        if window is not None:
            seen &= lengths[:, None, None] + row[:, None] - position < window
        return keys, values, jnp.broadcast_to(seen, (batch, rows, size))

    distance = row[:, None] - row
    seen = jnp.ones((rows, rows), bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= (distance < window) & (causal | (-distance < window))
    last = (block_keys, block_values, jnp.broadcast_to(seen, (batch, rows, rows)))
    n_blocks = -(-lengths.max() // size)
    return streaming_attention(grouped, load, n_blocks, last, scale).reshape(query.shape)
