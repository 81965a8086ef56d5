"""draft_attention in Pallas: key splits at fixed positions, the block as one more, one merge.

A program takes all rows of the block that share a key head, over one split of the context; a
further one takes the block itself. A row's sums depend on its slot's length alone, never on the
batch or the capacity.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.gpu import Tile, launch, layer_operand
from k26jax.pallas.tiles import tile as tile_of
from k26jax.pallas.tree_mla.splits import TIERS, Tiers, split_of, split_start

_LOWEST = -1e30

State = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(
    jax.jit, static_argnames=("window", "causal", "scale", "tile", "merge_tile", "tiers")
)
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
    tile: Tile | None = None,
    merge_tile: Tile | None = None,
    tiers: Tiers | None = None,
) -> Float32[Array, "b t h width"]:
    """Returns the attended values of each head; arguments as in `reference.draft_attention`.

    Args:
      tile: at most so many rows, and keys of one product; the table's without.
      merge_tile: splits that the merge takes at once; the table's without.
      tiers: the partition of positions, sizes ascending; that of `tiers_for` without.

    Cost: a float32 row for each block row, head and split that the capacity and the window reach.
      16 rows of 64 heads on 8 key heads: 17 MB at a capacity of 32k, 42 MB at 128k.
    """
    shape = _shape_of(query, cache_keys, window, causal, scale, tile, tiers)
    programs, tile = shape.batch * shape.kv_heads, merge_tile or tile_of("draft_attention_merge")
    query_of = query.reshape(shape.output)
    part = (shape.batch, shape.kv_heads, shape.n_splits + 1, shape.row_tiles * shape.tile.rows)
    partials = launch(
        functools.partial(_attend, shape=shape),
        layer_operand(layer),
        lengths,
        query_of,
        cache_keys,
        cache_values,
        block_keys,
        block_values,
        name="draft_attention",
        grid=(programs * shape.row_tiles * (shape.n_splits + 1),),
        out_shape=[
            jax.ShapeDtypeStruct((*part, *width), jnp.float32)
            for width in ((), (), (_padded(shape.width),))
        ],
        tile=shape.tile,
    )
    return launch(
        functools.partial(_merge, shape=shape, tile=tile),
        lengths,
        *partials,
        name="draft_attention_merge",
        grid=(programs * shape.rows,),
        out_shape=jax.ShapeDtypeStruct(shape.output, jnp.float32),
        tile=tile,
    ).reshape(query.shape)


@dataclass(frozen=True)
class _Shape:
    """Static sizes of one launch.

    group: heads that share a key head.
    n_splits: splits that any row's context can touch.
    """

    batch: int
    tokens: int
    kv_heads: int
    group: int
    width: int
    n_splits: int
    window: int | None
    causal: bool
    scale: float
    tile: Tile
    tiers: Tiers

    @property
    def rows(self) -> int:
        return self.tokens * self.group

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.rows, self.tile.rows)

    @property
    def output(self) -> tuple[int, ...]:
        return self.batch, self.tokens, self.kv_heads, self.group, self.width


def tiers_for(kv_heads: int) -> Tiers:
    """Returns the partition of positions: the more programs a split has, the fewer splits.

    Partial results are written and read again, so more splits than keep a GPU busy cost time.
    """
    *near, far = TIERS
    return (*((size, max(count // kv_heads, 1)) for size, count in near), far)


def _shape_of(
    query: jax.Array,
    cache: jax.Array,
    window: int | None,
    causal: bool,
    scale: float,
    tile: Tile | None,
    tiers: Tiers | None,
) -> _Shape:
    batch, tokens, heads, width = query.shape
    capacity, kv_heads = cache.shape[2:4]
    # Float32 products of full precision need more registers.
    kind = "draft_attention" + ("_float32" if query.dtype == jnp.float32 else "")
    tile, tiers = tile or tile_of(kind), tiers or tiers_for(kv_heads)
    group = heads // kv_heads
    rows = min(tile.rows, _padded(tokens * group))
    # Half of the rows need half of the warps.
    warps = max(min(tile.warps, 4), tile.warps * rows // tile.rows)
    n_splits = int(split_of(capacity - 1, tiers, np)) + 1
    if window is not None:
        # Most are touched from the last position of the first split on: sizes ascend.
        reach = tiers[0][0] - 1 + max(window - 2, 0)
        n_splits = min(n_splits, int(split_of(reach, tiers, np)) + 1)
    return _Shape(
        batch=batch,
        tokens=tokens,
        kv_heads=kv_heads,
        group=group,
        width=width,
        n_splits=n_splits,
        window=window,
        causal=causal,
        scale=scale,
        tile=replace(tile, rows=rows, warps=warps),
        tiers=tiers,
    )


def _padded(n: int) -> int:
    """Returns the size that an axis of n has inside a kernel: a power of two that a dot takes."""
    return max(16, pl.next_power_of_2(n))


def _context(length: jax.Array, shape: _Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the first position that any row sees, its split, and how many splits are seen."""
    low = jnp.int32(0)
    if shape.window is not None:
        low = jnp.maximum(length - shape.window + 1, 0)
    first = split_of(low, shape.tiers)
    n_seen = split_of(length - 1, shape.tiers) - first + 1
    return low, first, jnp.where(low < length, n_seen, 0)


class _Operands(NamedTuple):
    """References of `_attend` in their order: what it reads, then the partials it writes."""

    layer: Any
    lengths: Any
    query: Any
    keys: Any
    values: Any
    block_keys: Any
    block_values: Any
    highest: Any
    total: Any
    weighted: Any


def _attend(*refs: Any, shape: _Shape) -> None:
    """One program: the partial softmax of rows over one split, or (part 0) over the block."""
    on, tile = _Operands(*refs), shape.tile
    number, tile_number = pl.program_id(0) // shape.row_tiles, pl.program_id(0) % shape.row_tiles
    number, head = number // shape.kv_heads, number % shape.kv_heads
    slot = number % shape.batch
    # Long splits start first, the block last.
    part = shape.n_splits - number // shape.batch
    _, first, n_seen = _context(on.lengths[slot], shape)
    row = tile_number * tile.rows + jnp.arange(tile.rows)
    token = jnp.minimum(row, shape.rows - 1) // shape.group

    def run(absorb_all: Callable[[jax.Array, State], State]) -> None:
        query_at = (slot, token, head, row % shape.group)
        highest, total, weighted = absorb_all(
            _load(on.query, query_at, row < shape.rows),
            (
                jnp.full(tile.rows, _LOWEST, jnp.float32),
                jnp.zeros(tile.rows, jnp.float32),
                jnp.zeros((tile.rows, _padded(shape.width)), jnp.float32),
            ),
        )
        at = (slot, head, part, pl.ds(tile_number * tile.rows, tile.rows))
        plt.store(on.highest.at[at], highest)
        plt.store(on.total.at[at], total)
        plt.store(on.weighted.at[(*at, pl.ds(0, weighted.shape[1]))], weighted)

    where = (on, shape, slot, head, token)
    pl.when((part > 0) & (part <= n_seen))(
        lambda: run(functools.partial(_absorb_split, *where, first + part - 1))
    )
    pl.when(part == 0)(lambda: run(functools.partial(_absorb_block, *where)))


def _absorb_split(
    on: _Operands,
    shape: _Shape,
    slot: jax.Array,
    head: jax.Array,
    token: jax.Array,
    split: jax.Array,
    query: jax.Array,
    state: State,
) -> State:
    """Returns the running softmax with one split of the context."""
    layer, length, size = on.layer[0], on.lengths[slot], shape.tile.columns
    low = _context(length, shape)[0]
    begin, end = split_start(split, shape.tiers), split_start(split + 1, shape.tiers)

    def absorb(block: jax.Array, state: State, *, is_seen: bool) -> State:
        position = begin + block * size + jnp.arange(size)
        held = seen = None
        if not is_seen:
            held = (position >= low) & (position < length)
            seen = held[None, :]
            if shape.window is not None:
                seen &= position[None, :] > (length + token - shape.window)[:, None]
        at = (layer, slot, position, head)
        keys, values = _load(on.keys, at, held), _load(on.values, at, held)
        return _absorb(query, keys, values, seen, shape.scale, state)

    for is_seen, start, stop in _blocks(begin, end, low, length, shape):
        state = lax.fori_loop(start, stop, functools.partial(absorb, is_seen=is_seen), state)
    return state


def _absorb_block(
    on: _Operands,
    shape: _Shape,
    slot: jax.Array,
    head: jax.Array,
    token: jax.Array,
    query: jax.Array,
    state: State,
) -> State:
    """Returns the running softmax with the block's own keys."""
    key = jnp.arange(_padded(shape.tokens))
    at, held = (slot, key, head), key < shape.tokens
    keys, values = _load(on.block_keys, at, held), _load(on.block_values, at, held)
    return _absorb(query, keys, values, _seen_in_block(token, key, shape), shape.scale, state)


def _blocks(
    begin: jax.Array, end: jax.Array, low: jax.Array, length: jax.Array, shape: _Shape
) -> list[tuple[bool, jax.Array, jax.Array]]:
    """Returns ranges of a split's key blocks in order, and whether every row sees all of them."""
    size = shape.tile.columns
    first, last = jnp.maximum(low - begin, 0) // size, jnp.minimum(end, length) - begin
    stop, seen_from = pl.cdiv(last, size), first
    if shape.window is not None:
        # The last row's window starts last.
        start = length + shape.tokens - shape.window
        seen_from = jnp.clip(pl.cdiv(jnp.maximum(start - begin, 0), size), first, stop)
    seen_to = jnp.maximum(last // size, seen_from)
    ranges = [(True, seen_from, seen_to), (False, seen_to, stop)]
    return ranges if shape.window is None else [(False, first, seen_from), *ranges]


def _seen_in_block(token: jax.Array, key: jax.Array, shape: _Shape) -> jax.Array:
    """Returns which of the block's keys each row sees."""
    distance = token[:, None] - key[None, :]
    seen = (key < shape.tokens)[None, :]
    if shape.causal:
        seen &= distance >= 0
    if shape.window is not None:
        seen &= jnp.abs(distance) < shape.window
    return seen


def _load(ref: Any, at: tuple[Any, ...], exists: jax.Array | None) -> jax.Array:
    """Returns rows of the reference, padded with zeros to a power of two.

    Args:
      at: index of each axis but the last; one or several are arrays of rows.
      exists: which rows to read, the others being zero; None for all.
    """
    width = ref.shape[-1]
    columns = jnp.arange(_padded(width))
    rows = ref.at[(*(part[:, None] if jnp.ndim(part) else part for part in at), columns[None, :])]
    if exists is None and width == len(columns):
        return plt.load(rows)
    mask = (columns < width)[None, :]
    return plt.load(rows, mask=mask if exists is None else exists[:, None] & mask, other=0)


def _absorb(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array | None,
    scale: float,
    state: State,
) -> State:
    """Returns the running softmax with one more block of keys.

    Args:
      seen: which keys a row sees, perhaps none; None where every row sees all.
    """
    highest, total, weighted = state
    dot = functools.partial(
        plt.dot, precision=lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    )
    scores = dot(query, keys, trans_b=True) * (scale * math.log2(math.e))
    if seen is not None:
        # Less than any highest: an unseen key has no weight even where none is seen yet.
        scores = jnp.where(seen, scores, -jnp.inf)
    new_highest = jnp.maximum(highest, scores.max(axis=1))
    weights = jnp.exp2(scores - new_highest[:, None])
    shrink = jnp.exp2(highest - new_highest)
    return (
        new_highest,
        total * shrink + weights.sum(axis=1),
        weighted * shrink[:, None] + dot(weights.astype(values.dtype), values),
    )


def _merge(
    lengths_ref: Any,
    highest_ref: Any,
    total_ref: Any,
    weighted_ref: Any,
    out_ref: Any,
    *,
    shape: _Shape,
    tile: Tile,
) -> None:
    """One program: one row of one key head, from the block and the splits in their order."""
    number, row = pl.program_id(0) // shape.rows, pl.program_id(0) % shape.rows
    slot, head = number // shape.kv_heads, number % shape.kv_heads
    n_parts = _context(lengths_ref[slot], shape)[2] + 1
    columns = jnp.arange(weighted_ref.shape[-1])

    def add(chunk: jax.Array, state: State) -> State:
        highest, total, weighted = state
        part = chunk * tile.splits + jnp.arange(tile.splits)
        exists, at = part < n_parts, (slot, head, part, row)
        highest_of = plt.load(highest_ref.at[at], mask=exists, other=_LOWEST)
        total_of = plt.load(total_ref.at[at], mask=exists, other=0.0)
        weighted_of = _load(weighted_ref, at, exists)
        new_highest = jnp.maximum(highest, highest_of.max())
        shrink, share = jnp.exp2(highest - new_highest), jnp.exp2(highest_of - new_highest)
        return (
            new_highest,
            total * shrink + jnp.sum(share * total_of),
            weighted * shrink + jnp.sum(share[:, None] * weighted_of, axis=0),
        )

    start = jnp.float32(_LOWEST), jnp.float32(0), jnp.zeros(columns.shape, jnp.float32)
    _, total, weighted = lax.fori_loop(0, pl.cdiv(n_parts, tile.splits), add, start)
    at = (slot, row // shape.group, head, row % shape.group, pl.ds(0, columns.shape[0]))
    plt.store(out_ref.at[at], weighted / total, mask=columns < shape.width)
