"""The two programs of tree_mla: a partial softmax over one split, and the merge of the splits."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k26jax.pallas.gpu import Tile
from k26jax.pallas.tree_mla.splits import Tiers, piece_of, split_of, split_size, split_start

_MASKED = -1e30

State = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class Shape:
    """Static sizes of one launch.

    n_splits: whole splits that the capacity and the tree can reach.
    n_pieces: pieces that a split can be cut into.
    n_tail: parts that one token has for itself.
    n_mixed: key blocks of a split that can hold tree rows.
    page: rows of a page, or of a slot where there is no page table.
    """

    batch: int
    tokens: int
    heads: int
    latent: int
    n_splits: int
    n_pieces: int
    n_tail: int
    n_mixed: int
    page: int
    is_paged: bool
    tile: Tile
    tiers: Tiers
    scale: float

    @property
    def rows(self) -> int:
        return self.tokens * self.heads

    @property
    def head_tiles(self) -> int:
        return pl.cdiv(self.heads, self.tile.rows)

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.rows, self.tile.rows)

    @property
    def tail_programs(self) -> int:
        return self.n_tail * self.tokens * self.head_tiles

    @property
    def programs(self) -> int:
        shared = (self.n_splits + self.n_pieces) * self.row_tiles
        return self.batch * (self.tail_programs + shared)

    @property
    def n_parts(self) -> int:
        """Places of partial results: splits, pieces of the split of the length, then of later ones.

        A row's last split can be a later one, while the shared programs write all rows' pieces.
        """
        return self.n_splits + self.n_pieces + self.n_tail - 1


def padded(n: int) -> int:
    """Returns the size that an axis of n has inside a kernel: a power of two that a dot takes."""
    return max(16, pl.next_power_of_2(n))


class Operands(NamedTuple):
    """References of `attend` in their order: what it reads, then the partials it writes.

    table: pages of each sequence; its slot where there is no page table.
    route: root path of each tree row.
    """

    layer: Any
    table: Any
    lengths: Any
    route: Any
    q_latent: Any
    q_pe: Any
    cache_c_kv: Any
    cache_k_pe: Any
    tree_c_kv: Any
    tree_k_pe: Any
    highest: Any
    total: Any
    weighted: Any


@dataclass(frozen=True)
class Job:
    """What one program does; traced numbers.

    is_tail: whether its rows are those of one token, which sees its own path.
    token: the tail's token; 0 in shared programs.
    part: where its partial result stands.
    first_row, end_row: its rows of all heads; a tile may reach past the end.
    begin, end: positions of its split or piece.
    last: the last position that its rows see.
    needed: whether there is anything to do.
    """

    sequence: jax.Array
    is_tail: jax.Array
    token: jax.Array
    length: jax.Array
    part: jax.Array
    first_row: jax.Array
    end_row: jax.Array
    begin: jax.Array
    end: jax.Array
    last: jax.Array
    needed: jax.Array

    def n_cached(self, keys: int) -> jax.Array:
        """Returns how many blocks of keys lie wholly in the cache."""
        return jnp.maximum(jnp.minimum(self.end, self.length) - self.begin, 0) // keys

    def n_blocks(self, keys: int) -> jax.Array:
        """Returns how many blocks of keys there are."""
        return pl.cdiv(jnp.minimum(self.end, self.last + 1) - self.begin, keys)


def job_of(
    program: jax.Array, lengths_ref: Any, last_of: Callable[..., jax.Array], shape: Shape
) -> Job:
    """Returns a program's work: tails first, then the last splits, tiles of a split together.

    Programs without work come last, or they would delay the others.

    Args:
      last_of: (sequence, token) -> the last position that the token sees.
    """
    piece = piece_of(shape.tiers)
    sequence, number = program % shape.batch, program // shape.batch
    is_tail = number < shape.tail_programs
    shared = number - shape.tail_programs
    head_tile, turn = number % shape.head_tiles, number // shape.head_tiles
    token = jnp.where(is_tail, turn % shape.tokens, 0)
    length = lengths_ref[sequence]
    last = jnp.where(is_tail, last_of(sequence, token), length - 1)
    boundary = split_of(length, shape.tiers)
    # Pieces of the split of the length that lie wholly below it.
    n_cut = lax.div(length - split_start(boundary, shape.tiers), piece)
    n_later = jnp.int32(0)
    if shape.tokens > 1:
        n_later = jnp.where(is_tail, split_of(last, shape.tiers) - boundary, 0)
    turn = jnp.where(is_tail, turn // shape.tokens, shared // shape.row_tiles)
    # A token whose last position lies in a later split takes the splits up to that one whole.
    is_whole = turn < jnp.where(is_tail, n_later, boundary)
    split = jnp.where(is_tail, boundary + jnp.minimum(turn, n_later), boundary - 1 - turn)
    split = jnp.where(is_tail | is_whole, split, boundary)
    number = turn - jnp.where(is_tail, n_later, boundary)
    number += jnp.where(is_tail & (n_later == 0), n_cut, 0)
    begin = split_start(split, shape.tiers) + jnp.where(is_whole, 0, number * piece)
    end = begin + jnp.where(is_whole, split_size(split, shape.tiers), piece)
    tail_row = token * shape.heads + head_tile * shape.tile.rows
    return Job(
        sequence=sequence,
        is_tail=is_tail,
        token=token,
        length=length,
        part=jnp.where(is_whole, split, piece_part(number, n_later > 0, shape)),
        first_row=jnp.where(is_tail, tail_row, shared % shape.row_tiles * shape.tile.rows),
        end_row=jnp.where(is_tail, (token + 1) * shape.heads, shape.rows),
        begin=begin,
        end=end,
        last=last,
        needed=jnp.where(is_tail, begin <= last, is_whole | (number < n_cut)),
    )


def piece_part(number: jax.Array, is_later: jax.Array, shape: Shape) -> jax.Array:
    """Returns where the partial result of a piece stands.

    Args:
      is_later: whether its split is one behind that of the length.
    """
    return number + shape.n_splits + is_later.astype(jnp.int32) * shape.n_pieces


def depth_of(route_ref: Any, sequence: jax.Array, token: jax.Array) -> jax.Array:
    """Returns how many ancestors a tree row has."""
    route = route_ref[sequence, token, :]
    return jnp.sum(jnp.where(route >= 0, 1, 0)) - 1


def attend(*refs: Any, shape: Shape) -> None:
    """One program: the partial softmax of one tile of rows over one split or piece of keys."""
    on, tile = Operands(*refs), shape.tile
    job = job_of(
        pl.program_id(0),
        on.lengths,
        lambda sequence, token: on.lengths[sequence] + depth_of(on.route, sequence, token),
        shape,
    )

    @pl.when(job.needed)
    def _() -> None:
        row = job.first_row + jnp.arange(tile.rows)
        is_row = row < job.end_row
        query = [load_rows(ref, (job.sequence, row), is_row) for ref in (on.q_latent, on.q_pe)]
        # Outside the loop where that is possible: a loop prefetches a look-up before the rows it
        # leads to, and those half as far.
        slot = on.layer[0], on.table[job.sequence, 0]

        def absorb(block: jax.Array, state: State, *, is_cached: bool) -> State:
            start = job.begin + block * tile.columns
            seen = start + jnp.arange(tile.columns) <= job.last
            keys = _keys(on, job, shape, slot, start, is_cached)
            return _absorb(query, keys, seen, shape.scale, state)

        state = (
            jnp.full(tile.rows, _MASKED, jnp.float32),
            jnp.zeros(tile.rows, jnp.float32),
            jnp.zeros((tile.rows, padded(shape.latent)), jnp.float32),
        )
        n_cached, n_blocks = job.n_cached(tile.columns), job.n_blocks(tile.columns)
        state = lax.fori_loop(0, n_cached, functools.partial(absorb, is_cached=True), state)
        # Blocks that may hold tree rows, written out: as a loop they need more registers than
        # there are.
        for block in (n_cached + turn for turn in range(shape.n_mixed)):
            state = lax.cond(
                block < n_blocks,
                functools.partial(absorb, block, is_cached=False),
                lambda state: state,
                state,
            )
        highest, total, weighted = state
        at = (job.sequence, job.part, pl.ds(job.first_row, tile.rows))
        plt.store(on.highest.at[at], highest, mask=is_row)
        plt.store(on.total.at[at], total, mask=is_row)
        columns = jnp.arange(weighted.shape[1])
        plt.store(
            on.weighted.at[(*at, pl.ds(0, len(columns)))],
            weighted,
            mask=is_row[:, None] & (columns < shape.latent)[None, :],
        )


def _keys(
    on: Operands,
    job: Job,
    shape: Shape,
    slot: tuple[jax.Array, jax.Array],
    start: jax.Array,
    is_cached: bool,
) -> list[jax.Array]:
    """Returns the key block at position `start`, latents and rotary keys, zero where unseen.

    Args:
      slot: layer, and the sequence's slot or its first page.
      is_cached: whether all of the block lies below the length.
    """
    position = start + jnp.arange(shape.tile.columns)
    cached = (*slot, position)
    if shape.is_paged:
        entry = jnp.minimum(start, jnp.maximum(job.length - 1, 0)) // shape.page
        page = on.table[job.sequence, entry]
        cached = (slot[0], page, position - entry * shape.page)
    if is_cached:
        return [load_rows(ref, cached) for ref in (on.cache_c_kv, on.cache_k_pe)]
    ahead, seen = position - job.length, position <= job.last
    node = plt.load(on.route.at[job.sequence, job.token, jnp.maximum(ahead, 0)], mask=seen, other=0)
    keys = []
    for cache, tree in ((on.cache_c_kv, on.tree_c_kv), (on.cache_k_pe, on.tree_k_pe)):
        held = load_rows(cache, cached, ahead < 0)
        keys.append(load_rows(tree, (job.sequence, node), seen & (ahead >= 0), held))
    return keys


def load_rows(ref: Any, at: tuple[Any, ...], exists: Any = None, other: Any = 0) -> jax.Array:
    """Returns rows of the reference, padded with `other` to a power of two.

    Args:
      at: index of each axis but the last; the last of these is an array of rows.
      exists: which rows to read, the others being `other`; without, all.
    """
    *lead, row = at
    width = ref.shape[-1]
    columns = jnp.arange(padded(width))
    rows = ref.at[(*lead, row[:, None], columns[None, :])]
    if exists is None and width == len(columns):
        return plt.load(rows)
    if exists is None:
        exists = jnp.full(row.shape, True)
    return plt.load(rows, mask=exists[:, None] & (columns < width)[None, :], other=other)


def _absorb(
    query: list[jax.Array], keys: list[jax.Array], seen: jax.Array, scale: float, state: State
) -> State:
    """Returns the running softmax with one more block of keys, of which every row sees one."""
    highest, total, weighted = state
    precision = lax.Precision.HIGHEST if keys[0].dtype == jnp.float32 else None
    dot = functools.partial(plt.dot, precision=precision)
    scores = dot(query[0], keys[0], trans_b=True) + dot(query[1], keys[1], trans_b=True)
    scores = jnp.where(seen[None, :], scores * (scale * math.log2(math.e)), _MASKED)
    new_highest = jnp.maximum(highest, scores.max(axis=1))
    weights = jnp.exp2(scores - new_highest[:, None])
    shrink = jnp.exp2(highest - new_highest)
    return (
        new_highest,
        total * shrink + weights.sum(axis=1),
        weighted * shrink[:, None] + dot(weights.astype(keys[0].dtype), keys[0]),
    )


def merge(
    lengths_ref: Any,
    route_ref: Any,
    highest_ref: Any,
    total_ref: Any,
    weighted_ref: Any,
    out_ref: Any,
    *,
    shape: Shape,
    tile: Tile,
) -> None:
    """One program: some latent columns of one row, from all its parts, in their order."""
    n_tiles = pl.cdiv(shape.latent, tile.columns)
    at, number = pl.program_id(0) % n_tiles, pl.program_id(0) // n_tiles
    sequence, row = number // shape.rows, number % shape.rows
    length = lengths_ref[sequence]
    last = length + depth_of(route_ref, sequence, row // shape.heads)
    n_whole = split_of(last, shape.tiers)
    is_later = n_whole > split_of(length, shape.tiers)
    n_parts = n_whole + (last - split_start(n_whole, shape.tiers)) // piece_of(shape.tiers) + 1
    # Sums may be too large for half the bytes, means are not.
    is_mean = weighted_ref.dtype == jnp.float16
    columns = at * tile.columns + jnp.arange(tile.columns)
    is_column = columns < shape.latent

    def add(chunk: jax.Array, state: State) -> State:
        highest, total, weighted = state
        number = chunk * tile.splits + jnp.arange(tile.splits)
        exists = number < n_parts
        part = jnp.where(number < n_whole, number, piece_part(number - n_whole, is_later, shape))
        share = plt.load(highest_ref.at[sequence, part, row], mask=exists, other=_MASKED)
        more = plt.load(total_ref.at[sequence, part, row], mask=exists, other=0)
        latents = plt.load(
            weighted_ref.at[sequence, part[:, None], row, columns[None, :]],
            mask=exists[:, None] & is_column[None, :],
            other=0,
        )
        new_highest = jnp.maximum(highest, share.max())
        shrink, share = jnp.exp2(highest - new_highest), jnp.exp2(share - new_highest)
        weight = share * more
        if is_mean:
            share, latents = weight, latents.astype(jnp.float32)
        return (
            new_highest,
            total * shrink + jnp.sum(weight),
            weighted * shrink + jnp.sum(share[:, None] * latents, axis=0),
        )

    start = jnp.float32(_MASKED), jnp.float32(0), jnp.zeros(tile.columns, jnp.float32)
    n_chunks = pl.cdiv(n_parts, tile.splits)
    _, total, weighted = lax.fori_loop(0, n_chunks, add, start)
    plt.store(
        out_ref.at[sequence, row, pl.ds(at * tile.columns, tile.columns)],
        weighted / total,
        mask=is_column,
    )
