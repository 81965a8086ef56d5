"""The router and the experts' work list as Pallas kernels."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float32, Int32

from k26jax.pallas.gpu import Tile, launch, layer_operand
from k26jax.pallas.router import reference
from k26jax.pallas.router.blocks import MAX_PAIRS, store_blocks
from k26jax.pallas.router.choose import Rule, choose, store_rows
from k26jax.pallas.router.reference import Blocks, most_blocks
from k26jax.pallas.tiles import tile as tile_of

_RULE = tuple(name for name in Rule._fields if name != "n_experts")


@functools.partial(jax.jit, static_argnames=(*_RULE, "tile"))
def route(
    router_logits: Float32[Array, "*part t e"],
    selection_bias: Float32[Array, "*l e"] | None,
    *,
    layer: int | Int32[Array, ""] = 0,
    tile: Tile | None = None,
    **rule: Any,
) -> tuple[Int32[Array, "t k"], Float32[Array, "t k"]]:
    """Returns the same as `reference.route`, by one program a token."""
    operands = _Operands.of(router_logits, selection_bias, None, layer)
    return _route(operands, Rule(router_logits.shape[-1], **rule), tile)


@functools.partial(jax.jit, static_argnames=("n_experts", "rows", "tile"))
def block_list(
    topk_ids: Int32[Array, "t k"], n_experts: int, rows: int, *, tile: Tile | None = None
) -> Blocks:
    """Returns the same as `reference.block_list`; in one program, up to 512 pairs."""
    n_pairs = topk_ids.size
    if n_pairs > MAX_PAIRS:
        return reference.block_list(topk_ids, n_experts, rows)

    def kernel(ids_ref: Any, *refs: Any) -> None:
        pair = jnp.arange(max(pl.next_power_of_2(n_pairs), 32))
        is_pair = pair < n_pairs
        ids = plt.load(ids_ref.at[pl.ds(0, pair.shape[0])], mask=is_pair, other=0)
        expert = jnp.where((ids >= 0) & (ids < n_experts), ids, n_experts)
        expert = jnp.where(is_pair, expert, n_experts + 1)
        store_blocks(expert, pair, n_pairs, n_experts, rows, refs)

    return Blocks(
        *launch(
            kernel,
            topk_ids.reshape(-1),
            name="block_list",
            grid=(1,),
            out_shape=_block_shapes(n_pairs, n_experts, rows),
            tile=tile or tile_of("block_list"),
        )
    )


@functools.partial(jax.jit, static_argnames=("rows", *_RULE, "tile"))
def route_and_list(
    router_logits: Float32[Array, "*part t e"],
    selection_bias: Float32[Array, "*l e"] | None,
    valid: Bool[Array, "t"],
    *,
    rows: int,
    layer: int | Int32[Array, ""] = 0,
    tile: Tile | None = None,
    **rule: Any,
) -> tuple[Int32[Array, "t k"], Float32[Array, "t k"], Blocks]:
    """Returns the same as `reference.route_and_list`, in two launches.

    In one they are slower: its one program chooses for all tokens.
    """
    made = Rule(router_logits.shape[-1], **rule)
    operands = _Operands.of(router_logits, selection_bias, valid, layer)
    topk_ids, topk_weights = _route(operands, made, tile)
    return topk_ids, topk_weights, block_list(topk_ids, made.n_experts, rows)


class _Operands(NamedTuple):
    """What a router program reads, as arrays outside and as references inside.

    logits: [part, t, e].
    bias: [l, e]; None: no selection bias.
    valid: [t]; None: all.
    """

    layer: Any
    logits: Any
    bias: Any
    valid: Any

    @classmethod
    def of(cls, logits: jax.Array, bias: jax.Array | None, valid: Any, layer: Any) -> "_Operands":
        if bias is not None:
            bias = bias.reshape(-1, bias.shape[-1])
        return cls(layer_operand(layer), logits.reshape(-1, *logits.shape[-2:]), bias, valid)

    def given(self) -> tuple[Any, ...]:
        return tuple(operand for operand in self if operand is not None)

    def named(self, refs: tuple[Any, ...]) -> tuple["_Operands", list[Any]]:
        """Returns the references of the operands, and those of the outputs."""
        rest = list(refs)
        return _Operands(*(None if one is None else rest.pop(0) for one in self)), rest


def _route(operands: _Operands, rule: Rule, tile: Tile | None) -> tuple[jax.Array, jax.Array]:
    n_tokens = operands.logits.shape[1]

    def kernel(*refs: Any) -> None:
        on, outputs = operands.named(refs)
        token = pl.program_id(0)
        ids, weights = choose(on.logits, on.bias, on.layer[0], token, 1, rule)
        if on.valid is not None:
            ids = jnp.where(on.valid[token], ids, rule.n_experts)
        store_rows(outputs, (ids, weights), token, rule)

    return launch(
        kernel,
        *operands.given(),
        name="router",
        grid=(n_tokens,),
        out_shape=_row_shapes(n_tokens, rule),
        tile=tile or tile_of("router"),
    )


def _row_shapes(n_tokens: int, rule: Rule) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = n_tokens, rule.num_experts_per_tok
    return jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)


def _block_shapes(n_pairs: int, n_experts: int, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    most = most_blocks(n_pairs, n_experts, rows)
    lengths = n_pairs + rows, most, most, most, 1
    return tuple(jax.ShapeDtypeStruct((length,), jnp.int32) for length in lengths)
