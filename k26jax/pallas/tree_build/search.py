"""Best-first search for the most probable prefixes, in plain JAX and inside a kernel.

A node is a row of the tree, 0 the root. Each node offers one candidate, its next child: children
come in the order of their ranks. Candidates of one cost go by their rank tuples. The tuple of a
candidate follows those of all nodes below its parent, so candidates order as their parents do in
postorder; and a new node, the last child so far, stands in postorder just before its parent.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k26jax.pallas.inside import HIGHEST, LOWEST
from k26jax.pallas.tree_build.cost import INFINITE, Cost, add, cost_of, nothing, where


class Front(NamedTuple):
    """What nodes offer, [n]; n is a power of two above the budget."""

    offer: Cost  # of the next child; infinite: there is none
    own: Cost
    place: jax.Array  # in postorder
    rank: jax.Array  # of the next child
    depth: jax.Array


class Found(NamedTuple):
    """The best candidate; all fields are scalars."""

    exists: jax.Array
    parent: jax.Array
    rank: jax.Array
    depth: jax.Array  # of the new node


LogProb = Callable[[jax.Array, jax.Array], jax.Array]


def start(n: int, log_prob: LogProb) -> Front:
    """Returns the front of the root alone.

    Args:
      log_prob: (row of the table, rank) -> float32, minus infinity outside the table.
    """
    lane = jnp.arange(n)
    zero = jnp.zeros_like(lane)
    free = Cost(zero.astype(jnp.uint32), zero.astype(jnp.uint32))
    first = cost_of(log_prob(jnp.int32(0), jnp.int32(0)))
    return Front(where(lane == 0, first, nothing(lane)), free, zero, zero, zero)


def grow(front: Front, row: jax.Array, log_prob: LogProb) -> tuple[Front, Found]:
    """Returns the front after the best candidate has become the node `row`, and that candidate."""
    lane = jnp.arange(front.rank.shape[0])
    # A high word is below 2**31; of a low one the first bit is flipped to order as signed.
    high = lax.bitcast_convert_type(front.offer.high, jnp.int32)
    low = lax.bitcast_convert_type(front.offer.low, jnp.int32) ^ LOWEST
    best_high = jnp.min(high)
    tied = high == best_high
    best_low = jnp.min(jnp.where(tied, low, HIGHEST))
    tied &= low == best_low
    place = jnp.min(jnp.where(tied, front.place, HIGHEST))
    parent = jnp.max(jnp.where(tied & (front.place == place), lane, 0))
    exists = best_high < INFINITE

    def of_parent(values: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(lane == parent, values, LOWEST))

    rank, depth = of_parent(front.rank), of_parent(front.depth)
    own = Cost(*(_unsigned(of_parent(_signed(word))) for word in front.own))
    cost = Cost(_unsigned(best_high), _unsigned(best_low ^ LOWEST))
    sibling = add(own, cost_of(log_prob(depth, rank + 1)))
    child = add(cost, cost_of(log_prob(depth + 1, jnp.int32(0))))

    is_parent, is_new = exists & (lane == parent), exists & (lane == row)
    after = exists & (front.place >= place)
    grown = Front(
        where(is_new, child, where(is_parent, sibling, front.offer)),
        where(is_new, cost, front.own),
        jnp.where(is_new, place, front.place + after.astype(jnp.int32)),
        jnp.where(is_parent, rank + 1, front.rank),
        jnp.where(is_new, depth + 1, front.depth),
    )
    return grown, Found(exists, parent, rank, depth + 1)


def _signed(word: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(word, jnp.int32)


def _unsigned(word: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(word, jnp.uint32)
