"""What stands between and behind the products of the experts: SwiGLU, and the sum over experts.

The shared expert's rows go along: its SwiGLU with the pairs', its down product with the sum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.gpu import Tile, launch, layer_operand
from k26jax.pallas.int4_moe.reference import Shared
from k26jax.pallas.tiles import tile as tile_of


def activate(
    gate_up: Float32[Array, "split pair o"],
    weights: Float32[Array, "pair"],
    shared: Shared | None,
    *,
    inner: int,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """Returns weight * silu(gate) * up [pair, inner] of each pair, and [t, f] of the shared expert.

    Partial sums are added in order. The shared expert's products are rounded first.
    """
    pairs = gate_up.shape[1]
    shapes: list[tuple[int, ...]] = [(pairs, inner)]
    operands: tuple[jax.Array, ...] = (gate_up, weights)
    if shared is not None:
        operands += shared[:2]
        shapes.append(shared.gate.shape[1:])
    return launch(
        functools.partial(_activate, inner=inner),
        *operands,
        name="int4_moe_activate",
        grid=(sum(shape[0] for shape in shapes),),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
        tile=tile_of("int4_moe_activate"),
    )


def _activate(gate_up: Any, weights: Any, *refs: Any, inner: int) -> None:
    """One program: a pair, or behind the pairs a row of the shared expert."""
    *shared, out = refs if len(refs) == 1 else (*refs[:2], refs[3], refs[2])
    row, pairs = pl.program_id(0), gate_up.shape[1]

    @pl.when(row < pairs)
    def _() -> None:
        gate = _sum(gate_up, row, 0, inner)
        value = gate * jax.nn.sigmoid(gate) * _sum(gate_up, row, inner, inner)
        _store_row(out, row, value * weights[row])

    if shared:
        gate_ref, up_ref, shared_out = shared

        @pl.when(row >= pairs)
        def _() -> None:
            width = shared_out.shape[1]
            gate, up = (
                _sum(ref, row - pairs, 0, width).astype(out.dtype).astype(jnp.float32)
                for ref in (gate_ref, up_ref)
            )
            _store_row(shared_out, row - pairs, jax.nn.silu(gate) * up)


def _sum(parts: Any, row: jax.Array, first: int, width: int) -> jax.Array:
    """Returns elements of a row of [part, row, element], the parts added in order."""
    column = jnp.arange(pl.next_power_of_2(width))
    value = jnp.zeros(column.shape, jnp.float32)
    for part in range(parts.shape[0]):
        at = parts.at[jnp.int32(part), row, first + column]
        value = value + plt.load(at, mask=column < width, other=0)
    return value


def _store_row(out: Any, row: jax.Array, value: jax.Array) -> None:
    column = jnp.arange(value.shape[0])
    plt.store(out.at[row, column], value.astype(out.dtype), mask=column < out.shape[1])


def combine(
    parts: Float32[Array, "split pair o"],
    topk_ids: Int32[Array, "t k"],
    shared: tuple[Float[Array, "t f"], Float[Array, "l d f"]] | None,
    *,
    layer: int | jax.Array,
    n_experts: int,
    like: jax.ShapeDtypeStruct,
) -> Float[Array, "t d"]:
    """Returns the sum over a token's experts, in order; pairs of no expert count zero.

    Args:
      shared: the shared expert's rows behind SwiGLU and its down projections; its product is
        added last, rounded first if the result has its rows' dtype: a float32 result is one rank's
        part, and is rounded with the others'.
      like: shape and dtype of the result.
    """
    cut = tile_of("int4_moe_combine")
    return launch(
        functools.partial(_combine, n_experts=n_experts, cut=cut),
        layer_operand(layer),
        parts,
        topk_ids,
        *(shared or ()),
        name="int4_moe_combine",
        grid=(pl.cdiv(like.shape[0], cut.rows), pl.cdiv(like.shape[1], cut.columns)),
        out_shape=like,
        tile=cut,
    )


def _combine(layer: Any, parts: Any, ids: Any, *refs: Any, n_experts: int, cut: Tile) -> None:
    """One program: some tokens and some outputs."""
    *shared, out = refs
    (tokens, width), top_k = out.shape, ids.shape[1]
    token = pl.program_id(0) * cut.rows + jnp.arange(cut.rows)
    column = pl.program_id(1) * cut.columns + jnp.arange(cut.columns)
    row_exists, column_exists = token < tokens, column < width
    value = jnp.zeros((cut.rows, cut.columns), jnp.float32)
    for choice in range(top_k):
        expert = plt.load(ids.at[token, jnp.int32(choice)], mask=row_exists, other=n_experts)
        is_chosen = (expert >= 0) & (expert < n_experts)
        mask = is_chosen[:, None] & column_exists[None, :]
        for split in range(parts.shape[0]):
            at = jnp.int32(split), (token * top_k + choice)[:, None], column[None, :]
            value = value + plt.load(parts.at[at], mask=mask, other=0)
    if shared:
        inner, down = shared
        product = _down(inner, down, layer[0], token, column, row_exists, column_exists, cut)
        if out.dtype == inner.dtype:
            product = product.astype(inner.dtype).astype(jnp.float32)
        value = value + product
    mask = row_exists[:, None] & column_exists[None, :]
    plt.store(out.at[token[:, None], column[None, :]], value.astype(out.dtype), mask=mask)


def _down(inner, down, layer, token, column, row_exists, column_exists, cut: Tile) -> jax.Array:
    """Returns a tile of the shared expert's down product, float32 [rows, columns]."""
    width = inner.shape[1]
    depth = max(16, min(cut.depth, pl.next_power_of_2(width)))
    precision = lax.Precision.HIGHEST if inner.dtype == jnp.float32 else None

    def step(number: jax.Array, total: jax.Array) -> jax.Array:
        element = number * depth + jnp.arange(depth)
        inside = (element < width)[None, :]
        rows = inner.at[token[:, None], element[None, :]]
        weights = down.at[layer, column[:, None], element[None, :]]
        row = plt.load(rows, mask=row_exists[:, None] & inside, other=0)
        weight = plt.load(weights, mask=column_exists[:, None] & inside, other=0)
        return total + plt.dot(row, weight.astype(row.dtype).T, precision=precision)

    zero = jnp.zeros((cut.rows, cut.columns), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(width, depth), step, zero)
