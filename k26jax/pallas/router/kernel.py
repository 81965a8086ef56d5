"""The router and the experts' work list as Pallas kernels."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float32, Int32

from k26jax.pallas.gpu import Tile, launch, layer_operand
from k26jax.pallas.inside import barrier
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
    operands = _Operands.of(router_logits, selection_bias, layer)
    return _route(operands, Rule(router_logits.shape[-1], **rule), tile, router_logits.shape[-1])


@functools.partial(jax.jit, static_argnames=("n_experts", "rows", "tile"))
def block_list(
    topk_ids: Int32[Array, "t k"], n_experts: int, rows: int, *, tile: Tile | None = None
) -> Blocks:
    """Returns the same as `reference.block_list`; in one program, up to 512 pairs."""
    n_pairs, top_k = topk_ids.size, topk_ids.shape[1]
    if n_pairs > MAX_PAIRS:
        return reference.block_list(topk_ids, n_experts, rows)

    def kernel(ids_ref: Any, *refs: Any) -> None:
        _list(ids_ref, refs, n_pairs, top_k, n_experts, rows)

    return Blocks(
        *launch(
            kernel,
            topk_ids,
            name="block_list",
            grid=(1,),
            out_shape=_block_shapes(n_pairs, n_experts, rows),
            tile=tile or tile_of("block_list"),
        )
    )


@functools.partial(jax.jit, static_argnames=("rows", "held", *_RULE, "tile"))
def route_and_list(
    router_logits: Float32[Array, "*part t e"],
    selection_bias: Float32[Array, "*l e"] | None,
    valid: Bool[Array, "t"],
    *,
    rows: int,
    layer: int | Int32[Array, ""] = 0,
    first: int | Int32[Array, ""] = 0,
    held: int | None = None,
    tile: Tile | None = None,
    **rule: Any,
) -> tuple[Int32[Array, "t k"], Float32[Array, "t k"], Blocks]:
    """Returns the same as `reference.route_and_list`, in two launches; for one token in one.

    The one program of one token goes on with the list. Several tokens have a program each; one
    program that chooses for all of them, and programs that count until the last one has finished,
    are slower than a second launch.
    """
    made = Rule(router_logits.shape[-1], **rule)
    held = made.n_experts if held is None else held
    operands = _Operands.of(router_logits, selection_bias, layer, valid, first)
    if operands.logits.shape[1] > 1 or made.num_experts_per_tok > MAX_PAIRS:
        topk_ids, topk_weights = _route(operands, made, tile, held)
        return topk_ids, topk_weights, block_list(topk_ids, held, rows)
    top_k = made.num_experts_per_tok

    def kernel(*refs: Any) -> None:
        on, (ids_ref, weights_ref, *block_refs) = operands.named(refs)
        _store_choice(on, (ids_ref, weights_ref), made, held)
        barrier()
        _list(ids_ref, block_refs, top_k, top_k, held, rows)

    topk_ids, topk_weights, *fields = launch(
        kernel,
        *operands.given(),
        name="router_list",
        grid=(1,),
        out_shape=(*_row_shapes(1, made), *_block_shapes(top_k, held, rows)),
        tile=tile or tile_of("router"),
    )
    return topk_ids, topk_weights, Blocks(*fields)


def _list(
    ids_ref: Any, refs: Sequence[Any], n_pairs: int, top_k: int, n_experts: int, rows: int
) -> None:
    """Stores the work list of ids [t, k]."""
    pair = jnp.arange(max(pl.next_power_of_2(n_pairs), 32))
    is_pair = pair < n_pairs
    ids = plt.load(ids_ref.at[pair // top_k, pair % top_k], mask=is_pair, other=0)
    expert = jnp.where((ids >= 0) & (ids < n_experts), ids, n_experts)
    expert = jnp.where(is_pair, expert, n_experts + 1)
    store_blocks(expert, pair, n_pairs, n_experts, rows, refs)


class _Operands(NamedTuple):
    """What a router program reads, as arrays outside and as references inside.

    logits: [part, t, e].
    bias: [l, e]; None: no selection bias.
    valid: [t]; None: all, and all experts are here.
    first: of the experts that are here, [1]; with `valid`.
    """

    layer: Any
    logits: Any
    bias: Any
    valid: Any
    first: Any

    @classmethod
    def of(
        cls,
        logits: jax.Array,
        bias: jax.Array | None,
        layer: Any,
        valid: jax.Array | None = None,
        first: Any = 0,
    ) -> "_Operands":
        if bias is not None:
            bias = bias.reshape(-1, bias.shape[-1])
        logits = logits.reshape(-1, *logits.shape[-2:])
        where = None if valid is None else layer_operand(first)
        return cls(layer_operand(layer), logits, bias, valid, where)

    def given(self) -> tuple[Any, ...]:
        return tuple(operand for operand in self if operand is not None)

    def named(self, refs: tuple[Any, ...]) -> tuple["_Operands", list[Any]]:
        """Returns the references of the operands, and those of the outputs."""
        rest = list(refs)
        return _Operands(*(None if one is None else rest.pop(0) for one in self)), rest


def _store_choice(on: _Operands, outputs: Sequence[Any], rule: Rule, held: int) -> None:
    """Stores topk_ids and topk_weights of one token."""
    token = pl.program_id(0)
    ids, weights = choose(on.logits, on.bias, on.layer[0], token, 1, rule)
    if on.valid is not None:
        local = ids - on.first[0]
        ids = jnp.where(on.valid[token] & (local >= 0) & (local < held), local, held)
    store_rows(outputs, (ids, weights), token, rule)


def _route(
    operands: _Operands, rule: Rule, tile: Tile | None, held: int
) -> tuple[jax.Array, jax.Array]:
    n_tokens = operands.logits.shape[1]

    def kernel(*refs: Any) -> None:
        on, outputs = operands.named(refs)
        _store_choice(on, outputs, rule, held)

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
