"""Cache rows: those that count land in their slot, and nothing else is touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k26jax.config import DraftConfig, ModelConfig
from k26jax.model.cache import DraftCache, LatentCache
from k26jax.pallas.norm import append

CAPACITY, N_LAYERS, N_SLOTS = 9, 2, 5


@pytest.mark.parametrize("trailing", [(3,), (2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_land_where_they_belong(trailing, dtype):
    """Counts of zero, some and all; a start at which rows run past the capacity; a full slot."""
    slots, start, count = [3, 0, 4, 1], [2, 0, 7, 9], [2, 4, 3, 1]
    rng = np.random.default_rng(8)
    cache = np.full((N_LAYERS, N_SLOTS, CAPACITY, *trailing), np.nan, np.float32)
    rows = rng.standard_normal((N_LAYERS, len(slots), 4, *trailing)).astype(np.float32)
    expected = cache.copy()
    for b, slot in enumerate(slots):
        for i in range(count[b]):
            if start[b] + i < CAPACITY:
                expected[:, slot, start[b] + i] = rows[:, b, i]
    arguments = (np.array(x, np.int32) for x in (slots, start, count))
    (found,) = jax.jit(append)((jnp.asarray(cache, dtype),), (rows,), *arguments)
    assert found.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), expected.astype(dtype).astype(np.float32)
    )
    assert np.isnan(expected[:, 2]).all()


def test_nothing_to_write():
    cache = np.arange(N_LAYERS * N_SLOTS * CAPACITY, dtype=np.float32)
    cache = cache.reshape(N_LAYERS, N_SLOTS, CAPACITY, 1)
    rows = np.full((N_LAYERS, 2, 3, 1), np.nan, np.float32)
    slots, zeros = np.array([1, 2], np.int32), np.zeros(2, np.int32)
    (found,) = jax.jit(append)((cache,), (rows,), slots, zeros, zeros)
    np.testing.assert_array_equal(found, cache)


def test_empty_caches(golden_dir):
    """Shapes follow the configuration; Kimi keeps kv_lora_rank + qk_rope_head_dim a token."""
    folders = sorted(path.parent for path in (golden_dir / "models").glob("*/config.json"))
    for config in map(ModelConfig.from_folder, folders):
        cache = LatentCache.empty(config, 3, 7, jnp.bfloat16)
        shape = (config.num_hidden_layers, 3, 7)
        assert cache.c_kv.shape == (*shape, config.kv_lora_rank)
        assert cache.k_pe.shape == (*shape, config.qk_rope_head_dim)
        assert cache.c_kv.dtype == cache.k_pe.dtype == jnp.bfloat16
    for path in sorted(golden_dir.glob("drafter*/config.json")):
        config = DraftConfig.from_folder(path.parent)
        cache = DraftCache.empty(config, 3, 7, jnp.float32)
        heads = (config.num_key_value_heads, config.head_dim)
        assert cache.keys.shape == (config.num_hidden_layers, 3, 7, *heads)
        assert cache.values.shape == cache.keys.shape
