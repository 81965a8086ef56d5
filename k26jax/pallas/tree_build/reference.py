"""Best-first trees in plain JAX, one node after the other."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from k26jax.pallas.tree_build.search import Front, grow, start


class Nodes(NamedTuple):
    """Trees of n = budget + 1 rows: the root, nodes in descending probability, padding."""

    token_ids: Int32[Array, "... n"]
    """Row 0 is the root's token; 0 in padding rows."""
    parent: Int32[Array, "... n"]
    """Row of the parent; -1 for the root and for padding."""
    depth: Int32[Array, "... n"]
    """Tokens below the root; 0 for padding."""
    valid: Bool[Array, "... n"]
    ancestors: UInt32[Array, "... n words"]
    """Bit j % 32 of word j // 32: row j is an ancestor or the row itself."""


def build(
    log_probs: Float32[Array, "b l k"],
    token_ids: Int32[Array, "b l k"],
    root: Int32[Array, "b"],
    budget: int,
) -> Nodes:
    """Returns for each table the tree of its `budget` most probable prefixes.

    Prefixes are in the total order (sum of -log-probs, tuple of ranks); sums are of doubles, from
    the root on.

    Args:
      log_probs: each row descending; a positive value counts as 0. From the first entry of a row
        that is not finite on, the row has no candidates.
      root: token of row 0.
      budget: nodes without the root, static.
    """
    if 0 in log_probs.shape:
        none = (log_probs.shape[0], 1, 1)
        log_probs, token_ids = jnp.full(none, -jnp.inf), jnp.zeros(none, jnp.int32)
    build_one = functools.partial(_build, budget=budget)
    return jax.vmap(build_one)(log_probs, token_ids, root)


def _build(log_probs: jax.Array, token_ids: jax.Array, root: jax.Array, budget: int) -> Nodes:
    depths, width = log_probs.shape

    def log_prob(depth: jax.Array, rank: jax.Array) -> jax.Array:
        inside = (depth < depths) & (rank < width)
        return jnp.where(inside, log_probs[depth, rank], -jnp.inf)

    def add(row: jax.Array, state: tuple[Front, Nodes]) -> tuple[Front, Nodes]:
        front, nodes = state
        front, found = grow(front, row, log_prob)
        own = jnp.uint32(1) << (row % 32).astype(jnp.uint32)
        above = jnp.where(found.exists, nodes.ancestors[found.parent], 0)
        new = Nodes(
            jnp.where(found.exists, token_ids[found.depth - 1, found.rank], 0),
            jnp.where(found.exists, found.parent, -1),
            jnp.where(found.exists, found.depth, 0),
            found.exists,
            above | jnp.where(jnp.arange(above.shape[0]) == row // 32, own, 0),
        )
        return front, jax.tree.map(lambda x, y: x.at[row].set(y), nodes, new)

    zero = jnp.zeros(budget + 1, jnp.int32)
    ancestors = jnp.zeros((budget + 1, budget // 32 + 1), jnp.uint32).at[0, 0].set(1)
    first = Nodes(zero.at[0].set(root), zero - 1, zero, zero.at[0].set(1) == 1, ancestors)
    front = start(1 << budget.bit_length(), log_prob)
    return lax.fori_loop(1, budget + 1, add, (front, first))[1]
