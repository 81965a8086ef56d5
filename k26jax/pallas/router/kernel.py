"""The router and the experts' work list as Pallas kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float32, Int32

from k26jax.pallas.gpu import Tile, launch
from k26jax.pallas.router import reference
from k26jax.pallas.router.blocks import MAX_PAIRS, store_blocks
from k26jax.pallas.router.choose import Rule, choose, store_rows
from k26jax.pallas.router.reference import Blocks, most_blocks
from k26jax.pallas.tiles import tile as tile_of

FUSED_TOKENS = 16
_RULE = tuple(name for name in Rule._fields if name != "n_experts")


@functools.partial(jax.jit, static_argnames=(*_RULE, "tile"))
def route(
    router_logits: Float32[Array, "t e"],
    selection_bias: Float32[Array, "e"] | None,
    *,
    tile: Tile | None = None,
    **rule: Any,
) -> tuple[Int32[Array, "t k"], Float32[Array, "t k"]]:
    """Returns the same as `reference.route`, by one program a token."""
    return _route(router_logits, selection_bias, None, Rule(router_logits.shape[1], **rule), tile)


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
    router_logits: Float32[Array, "t e"],
    selection_bias: Float32[Array, "e"] | None,
    valid: Bool[Array, "t"],
    *,
    rows: int,
    tile: Tile | None = None,
    **rule: Any,
) -> tuple[Int32[Array, "t k"], Float32[Array, "t k"], Blocks]:
    """Returns the same as `reference.route_and_list`; in one program, up to 16 tokens.

    A token's choice has the same bits as in `route`.
    """
    made = Rule(router_logits.shape[1], **rule)
    if router_logits.shape[0] > FUSED_TOKENS:
        topk_ids, topk_weights = _route(router_logits, selection_bias, valid, made, None)
        return topk_ids, topk_weights, block_list(topk_ids, made.n_experts, rows)
    return _fused(router_logits, selection_bias, valid, made, rows, tile)


def _route(
    router_logits: jax.Array,
    selection_bias: jax.Array | None,
    valid: jax.Array | None,
    rule: Rule,
    tile: Tile | None,
) -> tuple[jax.Array, jax.Array]:
    n_tokens = router_logits.shape[0]

    def kernel(*refs: Any) -> None:
        logits_ref, bias_ref, valid_ref, ids_ref, weights_ref = _named(refs, operands)
        token = pl.program_id(0)
        ids, weights = choose(logits_ref, bias_ref, token, 1, rule)
        if valid_ref is not None:
            ids = jnp.where(valid_ref[token], ids, rule.n_experts)
        store_rows((ids_ref, weights_ref), (ids, weights), token, rule)

    operands = (router_logits, selection_bias, valid)
    return launch(
        kernel,
        *(operand for operand in operands if operand is not None),
        name="router",
        grid=(n_tokens,),
        out_shape=_row_shapes(n_tokens, rule),
        tile=tile or tile_of("router"),
    )


def _fused(
    router_logits: jax.Array,
    selection_bias: jax.Array | None,
    valid: jax.Array,
    rule: Rule,
    rows: int,
    tile: Tile | None,
) -> tuple[jax.Array, jax.Array, Blocks]:
    n_tokens, n_experts = router_logits.shape
    top_k = rule.num_experts_per_tok
    n_pairs = n_tokens * top_k

    def kernel(*refs: Any) -> None:
        logits_ref, bias_ref, valid_ref, *row_refs, order, expert, first, count, n = _named(
            refs, operands
        )
        tokens = max(pl.next_power_of_2(n_tokens), 32 // rule.choices)
        ids, weights = choose(logits_ref, bias_ref, 0, tokens, rule)
        token = jnp.arange(tokens)
        is_valid = plt.load(valid_ref.at[pl.ds(0, tokens)], mask=token < n_tokens, other=False)
        ids = jnp.where(is_valid[:, None], ids, n_experts)
        store_rows(row_refs, (ids, weights), 0, rule)
        token, choice = token[:, None], jnp.arange(rule.choices)[None, :]
        pair = token * top_k + choice
        ids = jnp.where((token < n_tokens) & (choice < top_k), ids, n_experts + 1)
        blocks = order, expert, first, count, n
        store_blocks(ids.reshape(-1), pair.reshape(-1), n_pairs, n_experts, rows, blocks)

    operands = (router_logits, selection_bias, valid)
    topk_ids, topk_weights, *blocks = launch(
        kernel,
        *(operand for operand in operands if operand is not None),
        name="route_and_list",
        grid=(1,),
        out_shape=_row_shapes(n_tokens, rule) + _block_shapes(n_pairs, n_experts, rows),
        tile=tile or tile_of("route_and_list"),
    )
    return topk_ids, topk_weights, Blocks(*blocks)


def _named(refs: tuple[Any, ...], operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the references with None in place of the operands that are None."""
    rest = list(refs)
    given = [None if operand is None else rest.pop(0) for operand in operands]
    return (*given, *rest)


def _row_shapes(n_tokens: int, rule: Rule) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = n_tokens, rule.num_experts_per_tok
    return jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)


def _block_shapes(n_pairs: int, n_experts: int, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    most = most_blocks(n_pairs, n_experts, rows)
    lengths = n_pairs + rows, most, most, most, 1
    return tuple(jax.ShapeDtypeStruct((length,), jnp.int32) for length in lengths)
