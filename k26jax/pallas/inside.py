"""What kernels share inside: numbers as integers that order alike, selection, a barrier."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from k26jax.pallas.gpu import architecture

HIGHEST = jnp.iinfo(jnp.int32).max
LOWEST = jnp.iinfo(jnp.int32).min  # below the key of every number


def to_key(values: jax.Array) -> jax.Array:
    """Returns int32 that order as float32 numbers do: both zeros alike, NaN highest."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return jnp.where(values != values, HIGHEST, bits ^ ((bits >> 31) & HIGHEST))


def from_key(keys: jax.Array) -> jax.Array:
    """Returns the numbers of `to_key`; NaN for NaN."""
    return lax.bitcast_convert_type(keys ^ ((keys >> 31) & HIGHEST), jnp.float32)


def first_best(keys: jax.Array, lane: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest key of every row and the first lane that has it, both [rows, 1].

    Apart, because a GPU reduces one integer over a warp in one instruction.
    """
    best = jnp.max(keys, axis=1)[:, None]
    return best, jnp.min(jnp.where(keys == best, lane, HIGHEST), axis=1)[:, None]


def select_best(keys: jax.Array, count: int) -> jax.Array:
    """Returns whether each of the keys [n] is among the `count` largest, ties to the first.

    The smallest of them is found bit by bit, by 32 counts.
    """

    def lower(turn: jax.Array, bound: jax.Array) -> jax.Array:
        higher = bound ^ (jnp.int32(1) << (31 - turn))
        enough = jnp.sum((keys >= higher).astype(jnp.int32)) >= count
        return jnp.where(enough, higher, bound)

    # The bits of LOWEST are those of zero with the sign, which orders integers, flipped.
    bound = lax.fori_loop(0, 32, lower, jnp.int32(LOWEST))
    above = keys > bound
    missing = count - jnp.sum(above.astype(jnp.int32))
    equal = keys == bound
    return above | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= missing))


def barrier() -> None:
    """Makes what the program has stored visible to all of its threads."""
    if architecture() is not None:
        plt.debug_barrier()
