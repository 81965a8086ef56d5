"""Routed experts with INT4 weights, decoded in registers inside the product.

The chosen (token, expert) pairs come sorted into blocks of one expert; a program multiplies one
tile of outputs by one block. Weights are the left operand: matrix instructions take 16 rows of the
left one and eight columns of the right, and few experts have more than eight pairs. Four launches:
gate and up, SwiGLU, down, combine; the last two steps of the shared expert go along with SwiGLU
and combine. Each sum has one order, whatever the number of tokens. Source of the layout: `layout`.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.gpu import Tile, architecture, launch, layer_operand
from k26jax.pallas.int4_moe.between import activate, combine
from k26jax.pallas.int4_moe.layout import DEPTH, PLANES, TiledExperts, Tiles
from k26jax.pallas.int4_moe.reference import GROUP_SIZE, Shared
from k26jax.pallas.router.reference import Blocks
from k26jax.pallas.tiles import tile

SHORT_STEPS = 4


@functools.partial(jax.jit, static_argnames=("inner", "dtype", "rows"))
def experts(
    x: Float[Array, "t d"],
    topk_ids: Int32[Array, "t k"],
    topk_weights: Float32[Array, "t k"],
    blocks: Blocks,
    weights: TiledExperts,
    *,
    layer: int | Int32[Array, ""],
    inner: int,
    shared: Shared | None = None,
    dtype: DTypeLike = jnp.float32,
    rows: int | None = None,
) -> Float[Array, "t d"]:
    """Returns sum over k of topk_weights * expert(x), added in the order of k.

    Args:
      topk_ids: an id outside the experts takes no part.
      blocks: the pairs by expert, in blocks of at most `rows`.
      inner: width of one expert.
      shared: the shared expert, added last.
      dtype: of the result.
      rows: of a block; without, as in a step.

    Cost: the bytes of the experts that were chosen, once a block of rows.
    Reference: `reference.experts`.
    """
    n_experts = weights.down.words.shape[1]
    top_k = topk_ids.shape[1]
    cuts = [_cut(name, rows) for name in ("int4_moe_up", "int4_moe_down")]
    gate_up = product(
        x, weights.gate_up, blocks, "int4_moe_up", layer=layer, top_k=top_k, cut=cuts[0]
    )
    hidden, *rest = activate(gate_up, topk_weights.reshape(-1), shared, inner=inner, dtype=x.dtype)
    out = product(hidden, weights.down, blocks, "int4_moe_down", layer=layer, top_k=1, cut=cuts[1])
    down = None if shared is None else (rest[0], shared.down)
    like = jax.ShapeDtypeStruct(x.shape, dtype)
    return combine(out, topk_ids, down, layer=layer, n_experts=n_experts, like=like)


def _cut(name: str, rows: int | None) -> Tile:
    """Returns the tile of a product whose blocks have so many rows."""
    few = tile(name)
    return few if rows in (None, few.rows) else replace(tile(f"{name}_many"), rows=rows)


def product(
    x: Float[Array, "rows i"],
    weights: Tiles,
    blocks: Blocks,
    name: str,
    *,
    layer: int | jax.Array,
    top_k: int,
    cut: Tile | None = None,
) -> Float32[Array, "split pair o"]:
    """Returns each pair's row times its expert's matrix, in partial sums over the inputs.

    Pairs in no block are not written and may hold anything.

    Args:
      top_k: pair p reads row p // top_k of x.
      cut: the tile; default: the table's.
    """
    cut = cut or tile(name)
    steps, n_tiles = weights.steps, weights.words.shape[2]
    pairs = x.shape[0] * top_k
    n_blocks = blocks.expert.shape[0]
    if steps <= SHORT_STEPS:
        splits, body = 1, _short_kernel
        grid: tuple[int, ...] = (n_blocks, -(-n_tiles // cut.chunk))
    else:
        splits, body = min(cut.splits, steps), _long_kernel
        grid = (n_blocks, n_tiles, splits)
    outputs = n_tiles * weights.columns
    return launch(
        functools.partial(body, top_k=top_k, cut=cut),
        layer_operand(layer),
        blocks.order,
        blocks.expert,
        blocks.first,
        blocks.count,
        x,
        weights.words,
        weights.scales,
        name=name,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct((splits, pairs, outputs), jnp.float32),
        tile=cut,
    )


def _pairs(
    block: jax.Array, order: Any, first: Any, count: Any, cut: Tile
) -> tuple[jax.Array, jax.Array]:
    """Returns the pairs of a block, and which rows hold one."""
    row = jnp.arange(cut.rows)
    is_used = row < count[block]
    # Interpreted stores write masked lanes too, unless they are out of bounds.
    outside = order.shape[0]
    return plt.load(order.at[pl.ds(first[block], cut.rows)], mask=is_used, other=outside), is_used


def _long_kernel(
    layer, order, expert, first, count, x, words, scales, out, *, top_k: int, cut: Tile
):
    """One block of rows, one tile of outputs, one part of the inputs."""
    block, column, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    columns, steps = words.shape[4], words.shape[3]
    each = -(-steps // out.shape[0])

    @pl.when(count[block] > 0)
    def _():
        pair, is_used = _pairs(block, order, first, count, cut)
        place = (layer[0], expert[block], column)

        def absorb(step: jax.Array, total: jax.Array) -> jax.Array:
            rows = _inputs(x, pair // top_k, is_used, step)
            return _multiply(rows, words, scales, (*place, step), total)

        total = jnp.zeros((columns, cut.rows), jnp.float32)
        last = jnp.minimum((split + 1) * each, steps)
        total = lax.fori_loop(split * each, last, absorb, total)
        _store(out, split, pair, column, columns, total, is_used)


def _short_kernel(
    layer, order, expert, first, count, x, words, scales, out, *, top_k: int, cut: Tile
):
    """One block of rows, several tiles of outputs in turn; the rows stay in registers."""
    block, chunk = pl.program_id(0), pl.program_id(1)
    columns, steps, n_tiles = words.shape[4], words.shape[3], words.shape[2]

    @pl.when(count[block] > 0)
    def _():
        pair, is_used = _pairs(block, order, first, count, cut)
        rows = [_inputs(x, pair // top_k, is_used, step) for step in range(steps)]
        place = (layer[0], expert[block])

        def one(column: jax.Array, carry: jax.Array) -> jax.Array:
            total = jnp.zeros((columns, cut.rows), jnp.float32)
            for step in range(steps):
                total = _multiply(
                    rows[step], words, scales, (*place, column, jnp.int32(step)), total
                )
            _store(out, jnp.int32(0), pair, column, columns, total, is_used)
            return carry

        last = jnp.minimum((chunk + 1) * cut.chunk, n_tiles)
        lax.fori_loop(chunk * cut.chunk, last, one, jnp.int32(0))


def _inputs(x: Any, row: jax.Array, is_used: jax.Array, step: Any) -> list[jax.Array]:
    """Returns the groups [32, row] of a step of x's rows, four or what is left.

    Unused rows are not read.
    """
    width = x.shape[1]
    groups = []
    for plane in range(PLANES):
        start = step * DEPTH + plane * GROUP_SIZE
        if isinstance(start, int) and start >= width:
            break
        column = start + jnp.arange(GROUP_SIZE)
        mask = jnp.broadcast_to(is_used[None, :], (GROUP_SIZE, row.shape[0]))
        if width % DEPTH:
            mask &= (column < width)[:, None]
        groups.append(plt.load(x.at[row[None, :], column[:, None]], mask=mask, other=0))
    return groups


def _multiply(
    rows: list[jax.Array], words: Any, scales: Any, place: tuple, total: jax.Array
) -> jax.Array:
    """Returns total [column, row] + one tile times rows."""
    word = plt.load(words.at[place], eviction_policy="evict_first")
    pairs = [plt.load(scales.at[(*place, jnp.int32(half))]) for half in range(2)]
    for plane in range(len(rows)):
        weight = _decode(word, plane, pairs[plane // 2], rows[plane].dtype)
        precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        total = total + plt.dot(weight, rows[plane], precision=precision)
    return total


def _decode(word: jax.Array, plane: int, pair: jax.Array, dtype: Any) -> jax.Array:
    """Returns a plane of weights [column, 32]: (nibble - 8) * scale, rounded once to `dtype`."""
    half = lax.shift_right_logical(pair, jnp.int32(16)) if plane % 2 else pair
    scale = lax.bitcast_convert_type(half.astype(jnp.int16), jnp.bfloat16)
    # 128 + nibble has its nibble in the low bits of the significand, so both steps are exact.
    values = _plane_asm(word, plane) if architecture() else _plane(word, plane)
    return values.astype(dtype) * scale.astype(dtype)[:, None]


def _plane(word: jax.Array, plane: int) -> jax.Array:
    nibble = lax.shift_right_logical(word, jnp.int16(4 * plane)) & jnp.int16(15)
    return lax.bitcast_convert_type(nibble | jnp.int16(0x4300), jnp.bfloat16) - jnp.bfloat16(136)


def _plane_asm(word: jax.Array, plane: int) -> jax.Array:
    """Returns the same, two weights an instruction: one lop3 in place of and, or, convert."""
    fetch = f"shr.u32 n, $1, {4 * plane};" if plane else "mov.b32 n, $1;"
    code = (
        "{ .reg .b32 n; .reg .b32 zero;"
        f" {fetch} lop3.b32 n, n, 0x000F000F, 0x43004300, 0xEA;"
        " mov.b32 zero, 0x43084308; sub.rn.bf16x2 $0, n, zero; }"
    )
    out = jax.ShapeDtypeStruct(word.shape, jnp.bfloat16)
    return plt.elementwise_inline_asm(
        code, args=[word], constraints="=r,r", pack=2, result_shape_dtypes=[out]
    )[0]


def _store(
    out: Any,
    split: Any,
    pair: jax.Array,
    column: Any,
    columns: int,
    total: jax.Array,
    is_used: jax.Array,
) -> None:
    mask = jnp.broadcast_to(is_used[None, :], total.shape)
    place = column * columns + jnp.arange(columns)
    plt.store(out.at[split, pair[None, :], place[:, None]], total, mask=mask)
