"""The work list of a product grouped by expert, inside a kernel: sets of pairs as bits.

Pair j of a program is bit j % 32 of word j // 32. For each pair, the sets of the pairs with a
lower expert and with the same one come from the bits of the expert numbers, highest first: a
tenth of the work of comparing all pairs, and it needs no memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k26jax.pallas.router.reference import Blocks, most_blocks

MAX_PAIRS = 512  # larger sets do not fit in registers; three counts share a word up to 1024


def store_blocks(
    expert: jax.Array, pair: jax.Array, n_pairs: int, n_experts: int, rows: int, refs: Any
) -> None:
    """Stores the work list of `reference.block_list`.

    Args:
      expert: [n], n a power of two from 32 to 512: 0 to n_experts - 1; n_experts: of no expert;
        n_experts + 1: not a pair.
      pair: [n], ascending: numbers of the pairs.
      refs: references of the fields of `Blocks`.
    """
    refs = Blocks(*refs)
    n = expert.shape[0]
    lower, same = _compare(expert, (n_experts + 1).bit_length())
    lane, word = jnp.arange(n)[:, None], jnp.arange(n // 32)[None, :]
    partial = jnp.where(word == lane // 32, (1 << lane % 32) - 1, 0)
    before = lower | same & jnp.where(word < lane // 32, -1, partial)
    counts = _ones(before) | _ones(lower) << 10 | _ones(same) << 21
    counts = jnp.sum(counts, axis=1)
    rank, size = counts & 1023, lax.shift_right_logical(counts, 21)
    done = rank - (lax.shift_right_logical(counts, 10) & 2047)

    plt.store(
        refs.order.at[jnp.where(pair < n_pairs, rank, n_pairs + rows)],
        pair,
        mask=expert <= n_experts,
    )
    pad = jnp.full(rows, n_pairs, jnp.int32)
    plt.store(refs.order.at[pl.ds(n_pairs, rows)], pad)

    begins = (expert < n_experts) & (done % rows == 0)
    block = jnp.sum(_ones(before & _words(begins)), axis=1)
    n_blocks = jnp.sum(begins.astype(jnp.int32))
    most = most_blocks(n_pairs, n_experts, rows)
    # Interpreted stores write masked lanes too, unless they are out of bounds.
    place = jnp.where(begins, block, most)
    slot = jnp.arange(pl.next_power_of_2(most))
    dead = (slot >= n_blocks) & (slot < most)
    fields = (refs.expert, expert), (refs.first, rank), (refs.count, jnp.minimum(size - done, rows))
    for ref, value in fields:
        plt.store(ref.at[place], value, mask=begins)
        plt.store(ref.at[pl.ds(0, slot.shape[0])], jnp.zeros_like(slot), mask=dead)
    refs.n_blocks[0] = n_blocks


def _compare(expert: jax.Array, n_bits: int) -> tuple[jax.Array, jax.Array]:
    """Returns for each pair the pairs of lower experts and those of the same, words [n, n / 32]."""
    lower = jnp.zeros((expert.shape[0], expert.shape[0] // 32), jnp.int32)
    same = ~lower
    for place in reversed(range(n_bits)):
        bit = (expert >> place) & 1
        theirs, mine = _words(bit == 1), -bit[:, None]
        lower |= same & mine & ~theirs
        same &= ~(theirs ^ mine)
    return lower, same


def _words(flags: jax.Array) -> jax.Array:
    """Returns the set of pairs with a flag [n], words [1, n / 32]."""
    bit = jnp.arange(flags.shape[0]) % 32
    bits = jnp.where(flags, jnp.int32(1) << bit, 0)
    return jnp.sum(bits.reshape(-1, 32), axis=1)[None, :]


def _ones(words: jax.Array) -> jax.Array:
    return lax.population_count(words)
