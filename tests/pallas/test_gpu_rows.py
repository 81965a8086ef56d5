"""On a GPU: a row's bits depend on nothing but the row, and repeat.

JAX_PLATFORMS=cuda python -m pytest -m gpu tests/pallas/test_gpu_rows.py

Sizes are those of a rank of Kimi K2.6; interpreted (JAX_PLATFORMS=cpu) they are small, which tries
this file and not the card.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k26jax.pallas import (
    dense,
    draft_attention,
    int4_moe,
    norm,
    router,
    tree_build,
    tree_mla,
    vocab_topk,
)
from k26jax.pallas.bits import pack_bits
from k26jax.pallas.router.cases import KIMI_K26

pytestmark = pytest.mark.gpu

ON_CARD = jax.default_backend() == "gpu"
ROWS, COUNTS, REPEATS = (64, (1, 2, 8, 16, 17, 64), 100) if ON_CARD else (6, (1, 5), 2)
PALLAS = {"kernels": "pallas"}
BF16 = jnp.bfloat16


class Operation(NamedTuple):
    """rows: arrays whose first axis is the row; call: rows and other arrays -> results by row."""

    rows: tuple[jax.Array, ...]
    others: tuple[Any, ...]
    call: Callable[..., Any]


def size(on_card: int, interpreted: int) -> int:
    return on_card if ON_CARD else interpreted


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def values(seed: int, shape: tuple[int, ...], dtype: Any = BF16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def products() -> Operation:
    k = size(7168, 1100)
    weights = tuple(values(i, (2, n, k)) for i, n in enumerate((size(1536, 40), size(576, 24))))

    def call(x, weights):
        parts = dense.partial_sums(x, weights, layer=1, **PALLAS)
        whole = dense.dense(x, weights, layer=1, **PALLAS)
        inner = dense.gated(x, weights[0], weights[0], layer=1, **PALLAS)
        return [part.swapaxes(0, 1) for part in parts], whole, inner

    return Operation((values(9, (ROWS, k)),), (weights,), call)


def heads() -> Operation:
    n, latent, half = size(8, 2), size(512, 32), size(32, 4)
    kv_b = values(1, (2, n, 64, latent))
    query, attended = values(2, (ROWS, n, 32 + 2 * half)), values(3, (ROWS, n, latent), jnp.float32)
    angles = values(4, (ROWS, half), jnp.float32)

    def call(query, attended, angles, kv_b):
        options = {"layer": 1, "nope": 32, **PALLAS}
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return (
            dense.absorb(query, kv_b, cos, sin, interleaved=True, **options),
            dense.values(attended, kv_b, **options),
        )

    return Operation((query, attended, angles), (kv_b,), call)


def norms() -> Operation:
    width, rank, latent, half = size(7168, 200), size(1536, 48), size(512, 40), size(32, 4)
    gains = values(1, (2, width)), values(2, (2, latent)), values(3, (2, rank))
    rows = (
        values(4, (ROWS, width)),
        values(5, (ROWS, width)),
        values(6, (ROWS, 2, latent + 2 * half), jnp.float32),
        values(7, (ROWS, 2, rank), jnp.float32),
        values(8, (ROWS, half), jnp.float32),
        values(9, (ROWS, size(64, 3), 2 * half)),
    )

    def call(x, change, compressed, query, angles, heads, gains):
        options = {"layer": 1, "eps": 1e-5, **PALLAS}
        tables = jnp.cos(angles), jnp.sin(angles)
        parts = (part.swapaxes(0, 1) for part in (compressed, query))
        compressed, query = parts
        return (
            norm.add_rms_norm(x, change, gains[0], **options),
            norm.latent(
                compressed,
                gains[1],
                *tables,
                interleaved=True,
                query=query,
                query_gains=gains[2],
                **options,
            ),
            norm.head_norm(heads, gains[0][:, : heads.shape[2]], *tables, **options),
        )

    return Operation(rows, (gains,), call)


def routes() -> Operation:
    n_experts = size(384, 24)
    logits = values(1, (ROWS, 2, n_experts), jnp.float32)
    bias = values(2, (2, n_experts), jnp.float32)

    def call(logits, bias):
        options = {"layer": 1, **KIMI_K26, **PALLAS}
        parts, valid = logits.swapaxes(0, 1), jnp.ones(len(logits), bool)
        # One token's program makes the list too.
        *listed, _ = router.route_and_list(parts, bias, valid, rows=8, **options)
        return router.route(parts, bias, **options), listed

    return Operation((logits,), (bias,), call)


def experts() -> Operation:
    hidden, inner, n_experts = size(7168, 256), size(256, 32), size(384, 9)
    rng = np.random.default_rng(0)
    ids = np.stack([rng.choice(n_experts, 8, False) for _ in range(ROWS)])
    rows = (
        values(1, (ROWS, hidden)),
        jnp.asarray(ids, jnp.int32),
        values(2, (ROWS, 8), jnp.float32),
        values(3, (ROWS, 4, inner), jnp.float32),
        values(4, (ROWS, 4, inner), jnp.float32),
    )
    tiles = int4_moe.TiledExperts(
        tiles_of(n_experts, 2 * inner, hidden), tiles_of(n_experts, hidden, inner)
    )

    def call(x, ids, weights, gate, up, tiles, down):
        blocks = router.block_list(ids, n_experts, int4_moe.BLOCK_ROWS, **PALLAS)
        shared = int4_moe.Shared(gate.swapaxes(0, 1), up.swapaxes(0, 1), down)
        return int4_moe.tiled_experts(
            x, ids, weights, blocks, tiles, layer=0, inner=inner, shared=shared, dtype=BF16
        )

    return Operation(rows, (tiles, values(5, (1, hidden, inner))), call)


def tiles_of(n_experts: int, outputs: int, inputs: int) -> int4_moe.Tiles:
    columns = int4_moe.expert_columns()
    grid = (1, n_experts, -(-outputs // columns), -(-inputs // 128))
    words = jax.random.bits(jax.random.key(inputs), (*grid, columns, 32), jnp.uint16)
    # Two scales of 2^-7 each.
    scales = jnp.full((*grid, 2, columns), 0x3C003C00, jnp.int32)
    return int4_moe.Tiles(words.astype(jnp.int16), scales)


def attention(length: int) -> Operation:
    n, latent, rope = size(8, 2), size(512, 32), size(64, 8)
    capacity = length + 64
    cache = tuple(values(i, (2, 1, capacity, w)) for i, w in enumerate((latent, rope)))
    cache = tuple(part.at[:, :, length:].set(jnp.nan) for part in cache)
    rows = (
        values(2, (ROWS, n, latent)),
        values(3, (ROWS, n, rope)),
        values(4, (ROWS, latent)),
        values(5, (ROWS, rope)),
    )

    def call(query, q_pe, c_kv, k_pe, cache):
        out = tree_mla.tree_mla(
            query[None],
            q_pe[None],
            *cache,
            c_kv[None],
            k_pe[None],
            layer=1,
            slots=jnp.zeros(1, jnp.int32),
            lengths=jnp.full(1, length, jnp.int32),
            ancestors=pack_bits(jnp.eye(len(query), dtype=bool)[None]),
            scale=0.1,
            **PALLAS,
        )
        return out[0]

    return Operation(rows, (cache,), call)


def draft_blocks() -> Operation:
    """Here a row is a slot: the rows of a block see each other."""
    t, n, groups, width, length = 16, size(64, 4), size(8, 2), size(128, 16), size(4000, 70)
    slots = 8 if ON_CARD else ROWS
    rows = (
        values(1, (slots, t, n, width)),
        *(values(2 + i, (slots, 2, length, groups, width)) for i in range(2)),
        *(values(4 + i, (slots, t, groups, width)) for i in range(2)),
        jnp.arange(slots, dtype=jnp.int32) * (length // slots),
    )

    def call(query, cache_keys, cache_values, keys, new_values, lengths):
        caches = (part.swapaxes(0, 1) for part in (cache_keys, cache_values))
        options = {"layer": 1, "lengths": lengths, "window": None, "causal": False, "scale": 0.1}
        return draft_attention.draft_attention(
            query, *caches, keys, new_values, **options, **PALLAS
        )

    return Operation(rows, (), call)


def vocabulary() -> Operation:
    logits = values(1, (ROWS, size(163_840, 1000)), jnp.float32)

    def call(logits):
        best = vocab_topk.best_token(logits, **PALLAS)
        return best, tuple(vocab_topk.top_tokens(logits, 16, **PALLAS))

    return Operation((logits,), (), call)


def trees() -> Operation:
    table = -jnp.sort(jnp.abs(values(1, (ROWS, 7, 16), jnp.float32)), axis=-1)
    ids = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), table.shape)

    def call(table, ids):
        root = jnp.zeros(len(table), jnp.int32)
        return tree_build.build(table, ids, root, 16, **PALLAS)

    return Operation((table, ids), (), call)


OPERATIONS = {
    "products": products,
    "heads": heads,
    "norms": norms,
    "routes": routes,
    "experts": experts,
    "attention, 4k": functools.partial(attention, size(4090, 70)),
    "attention, 32k": functools.partial(attention, size(32_760, 100)),
    "draft blocks": draft_blocks,
    "vocabulary": vocabulary,
    "trees": trees,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_the_same_bits_in_every_call(name):
    operation = OPERATIONS[name]()
    call = jax.jit(operation.call)
    whole = jax.device_get(call(*operation.rows, *operation.others))
    n_rows = len(operation.rows[0])
    for count in COUNTS:
        for first in sorted({0, 3 % n_rows, n_rows - count}):
            if count > n_rows or first + count > n_rows:
                continue
            here = slice(first, first + count)
            some = call(*(part[here] for part in operation.rows), *operation.others)
            assert_same(jax.device_get(some), jax.tree.map(lambda x, here=here: x[here], whole))


@pytest.mark.parametrize("name", OPERATIONS)
def test_repeats_have_the_same_bits(name):
    operation = OPERATIONS[name]()
    call = jax.jit(operation.call)
    first = jax.device_get(call(*operation.rows, *operation.others))
    for _ in range(REPEATS):
        assert_same(jax.device_get(call(*operation.rows, *operation.others)), first)


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        assert not np.issubdtype(one.dtype, np.floating) or np.isfinite(one).all()
