"""The best tokens of rows of logits as Pallas kernels: chunks first, then one program a row.

A chunk gives the largest logit of each of its groups. Of the `count` best tokens none lies outside
the `count` groups whose largest logits are best: each other group has that many better logits
elsewhere. So one program sees a few thousand logits of a row, whatever the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.gpu import Tile, launch
from k26jax.pallas.inside import HIGHEST, LOWEST, barrier, from_key, select_best, to_key
from k26jax.pallas.tiles import tile as tile_of
from k26jax.pallas.vocab_topk.reference import TopTokens


@functools.partial(jax.jit, static_argnames="tile")
def best_token(
    logits: Float[Array, "t w"], *, tile: Tile | None = None
) -> tuple[Int32[Array, "t"], Float32[Array, "t"]]:
    """Returns the same as `reference.best_token`."""
    rows, width = logits.shape
    tile = tile or tile_of("best_token")
    chunks = pl.cdiv(width, tile.columns)

    def scan(logits_ref: Any, keys_ref: Any, ids_ref: Any) -> None:
        chunk, row = pl.program_id(0), pl.program_id(1)
        keys, token = _load_keys(logits_ref, row, chunk, tile.columns)
        keys_ref[row, chunk], ids_ref[row, chunk] = _first_best(keys, token)

    def merge(keys_ref: Any, ids_ref: Any, id_ref: Any, best_ref: Any) -> None:
        row = pl.program_id(0)
        lanes = pl.next_power_of_2(chunks)
        inside = jnp.arange(lanes) < chunks
        keys = plt.load(keys_ref.at[row, pl.ds(0, lanes)], mask=inside, other=LOWEST)
        ids = plt.load(ids_ref.at[row, pl.ds(0, lanes)], mask=inside, other=0)
        best, id_ref[row] = _first_best(keys, ids)
        best_ref[row] = from_key(best)

    partial = jax.ShapeDtypeStruct((rows, chunks), jnp.int32)
    found = launch(
        scan,
        logits,
        name="best_token_scan",
        grid=(chunks, rows),
        out_shape=(partial, partial),
        tile=tile,
    )
    return launch(
        merge,
        *found,
        name="best_token_merge",
        grid=(rows,),
        out_shape=(
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        tile=Tile(warps=1, stages=1),
    )


@functools.partial(jax.jit, static_argnames=("count", "scan_tile", "tile"))
def top_tokens(
    logits: Float[Array, "t w"],
    count: int,
    *,
    scan_tile: Tile | None = None,
    tile: Tile | None = None,
) -> TopTokens:
    """Returns the same as `reference.top_tokens`, for a count of 1 to 256."""
    rows, width = logits.shape
    scan_tile = scan_tile or tile_of("top_tokens_scan")
    chunks = pl.cdiv(width, scan_tile.columns)
    # Of a chunk; as many groups as logits of the best groups is least work.
    groups = 64 if count <= 64 else 128

    def scan(logits_ref: Any, groups_ref: Any, highest_ref: Any, total_ref: Any) -> None:
        chunk, row = pl.program_id(0), pl.program_id(1)
        keys, _ = _load_keys(logits_ref, row, chunk, scan_tile.columns)
        groups_ref[row, pl.ds(chunk * groups, groups)] = jnp.max(keys.reshape(groups, -1), axis=1)
        values = jnp.where(keys == LOWEST, -jnp.inf, from_key(keys))
        highest = jnp.max(values)
        highest_ref[row, chunk] = highest
        total_ref[row, chunk] = jnp.sum(jnp.exp(values - _finite(highest)))

    partial = jax.ShapeDtypeStruct((rows, chunks), jnp.float32)
    best, highest, total = launch(
        scan,
        logits,
        name="top_tokens_scan",
        grid=(chunks, rows),
        out_shape=(jax.ShapeDtypeStruct((rows, chunks * groups), jnp.int32), partial, partial),
        tile=scan_tile,
    )
    size = scan_tile.columns // groups
    return _merge(logits, best, highest, total, count, size, tile or tile_of("top_tokens"))


def _merge(
    logits: jax.Array,
    groups: jax.Array,
    highest: jax.Array,
    total: jax.Array,
    count: int,
    size: int,
    tile: Tile,
) -> TopTokens:
    (rows, width), n_groups, chunks = logits.shape, groups.shape[1], highest.shape[1]
    kept, lanes = min(count, n_groups), pl.next_power_of_2(count)

    def kernel(
        flat_ref: Any, groups_ref: Any, highest_ref: Any, total_ref: Any, *refs: Any
    ) -> None:
        ids_ref, logits_ref, log_probs_ref, log_total_ref, kept_ref, key_ref, token_ref = refs
        row = pl.program_id(0)
        first = row * lanes
        group = jnp.arange(pl.next_power_of_2(n_groups))
        mine = groups_ref.at[row, pl.ds(0, group.shape[0])]
        keys = plt.load(mine, mask=group < n_groups, other=LOWEST)
        _compact(select_best(keys, kept), first, (kept_ref, group))
        log_total = _log_total(highest_ref, total_ref, row, chunks)
        log_total_ref[row] = log_total
        barrier()
        token, is_token = _members(kept_ref, first, kept, size)
        is_token &= token < width
        values = plt.load(flat_ref.at[row * width + token], mask=is_token, other=0.0)
        keys = jnp.where(is_token, to_key(values.astype(jnp.float32)), LOWEST).reshape(-1)
        _compact(select_best(keys, count), first, (key_ref, keys), (token_ref, token.reshape(-1)))
        barrier()
        inside = jnp.arange(lanes) < count
        keys = plt.load(key_ref.at[pl.ds(first, lanes)], mask=inside, other=LOWEST)
        token = plt.load(token_ref.at[pl.ds(first, lanes)], mask=inside, other=0)
        place = jnp.where(inside, row * count + _rank(keys, key_ref, first, count), rows * count)
        plt.store(ids_ref.at[place], token, mask=inside)
        plt.store(logits_ref.at[place], from_key(keys), mask=inside)
        plt.store(log_probs_ref.at[place], from_key(keys) - log_total, mask=inside)

    best, real = rows * count, jnp.float32
    shapes = (best, jnp.int32), (best, real), (best, real), (rows, real)
    shapes += ((rows * lanes, jnp.int32),) * 3
    ids, top, log_probs, log_total, *_ = launch(
        kernel,
        logits.reshape(-1),
        groups,
        highest,
        total,
        name="top_tokens",
        grid=(rows,),
        out_shape=tuple(jax.ShapeDtypeStruct((length,), dtype) for length, dtype in shapes),
        tile=tile,
    )
    table = rows, count
    return TopTokens(ids.reshape(table), top.reshape(table), log_probs.reshape(table), log_total)


def _load_keys(
    logits_ref: Any, row: jax.Array, chunk: jax.Array, columns: int
) -> tuple[jax.Array, jax.Array]:
    """Returns keys and ids of the tokens of a chunk; LOWEST beyond the vocabulary."""
    token = chunk * columns + jnp.arange(columns)
    inside = token < logits_ref.shape[1]
    here = logits_ref.at[row, pl.ds(chunk * columns, columns)]
    values = plt.load(here, mask=inside, other=0.0).astype(jnp.float32)
    return jnp.where(inside, to_key(values), LOWEST), token


def _log_total(highest_ref: Any, total_ref: Any, row: jax.Array, chunks: int) -> jax.Array:
    lanes = pl.next_power_of_2(chunks)
    inside = jnp.arange(lanes) < chunks
    highest = plt.load(highest_ref.at[row, pl.ds(0, lanes)], mask=inside, other=-jnp.inf)
    total = plt.load(total_ref.at[row, pl.ds(0, lanes)], mask=inside, other=0.0)
    overall = _finite(jnp.max(highest))
    return overall + jnp.log(jnp.sum(total * jnp.exp(highest - overall)))


def _finite(highest: jax.Array) -> jax.Array:
    """Returns zero for minus infinity, so that a row of those has a sum of zero."""
    return jnp.where(highest == -jnp.inf, 0.0, highest)


def _compact(chosen: jax.Array, first: jax.Array, *pairs: tuple[Any, jax.Array]) -> None:
    """Stores the chosen of some values [n] in their order, from place `first` of a reference on."""
    place = first + jnp.cumsum(chosen.astype(jnp.int32)) - 1
    for ref, values in pairs:
        # Interpreted stores write masked lanes too, unless they are out of bounds.
        plt.store(ref.at[jnp.where(chosen, place, ref.shape[0])], values, mask=chosen)


def _members(
    groups_ref: Any, first: jax.Array, count: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of `count` groups, ascending, [padded, size], and whether they are."""
    slot = jnp.arange(pl.next_power_of_2(count))
    inside = slot < count
    group = plt.load(groups_ref.at[pl.ds(first, slot.shape[0])], mask=inside, other=0)
    return group[:, None] * size + jnp.arange(size)[None, :], inside[:, None]


def _rank(keys: jax.Array, ref: Any, first: jax.Array, count: int) -> jax.Array:
    """Returns the place in descending order of each of the keys [n] that are in memory, too."""
    slot = jnp.arange(keys.shape[0])[:, None]
    lanes = min(keys.shape[0], 64)

    def compare(part: jax.Array, rank: jax.Array) -> jax.Array:
        other = part * lanes + jnp.arange(lanes)
        theirs = ref.at[pl.ds(first + part * lanes, lanes)]
        theirs = plt.load(theirs, mask=other < count, other=LOWEST)[None, :]
        other = other[None, :]
        before = (theirs > keys[:, None]) | ((theirs == keys[:, None]) & (other < slot))
        return rank + jnp.sum(before.astype(jnp.int32), axis=1)

    return jax.lax.fori_loop(0, keys.shape[0] // lanes, compare, jnp.zeros_like(keys))


def _first_best(keys: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest of the keys [n] and the lowest of its ids."""
    best = jnp.max(keys)
    return best, jnp.min(jnp.where(keys == best, ids, HIGHEST))
