"""Stage accept: follows the target's own choices down the tree, without a loop."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k26jax.pallas.bits import pack_bits
from k26jax.spec.plan import Plan
from k26jax.spec.sampling import choose
from k26jax.spec.state import SpecState
from k26jax.spec.tree import Tree


class Accepted(NamedTuple):
    """The path that agreed with the target, and what it emits.

    path: int32 [b, depth + 1], accepted nodes from the root down; padding: 0.
    accepted_len: int32 [b], nodes on the path, the root included; before any limit.
    tokens: int32 [b, depth + 1], the tokens emitted: those below the root, then the bonus token.
    emitted_len: int32 [b], how many of them count: up to the first stop id, at most what the slot
        may emit, 0 for an idle slot. Also the nodes of the path that become committed.
    bonus_token: int32 [b], the last emitted token: the next anchor.
    remaining: int32 [b], tokens the slot may emit after these; 0 once it is done.
    """

    path: jax.Array
    accepted_len: jax.Array
    tokens: jax.Array
    emitted_len: jax.Array
    bonus_token: jax.Array
    remaining: jax.Array


def accept(tree: Tree, logits: jax.Array, state: SpecState, plan: Plan) -> Accepted:
    """Returns the accepted path and its tokens.

    A node holds if its token is what the target chose at its parent; it is accepted if it and all
    its ancestors hold. The target's choices at rejected nodes influence nothing.

    Args:
      tree: batched, [b, n].
      logits: float32 [b, n, w].
    """
    posterior = choose(logits, state.length, tree.depth, state.sampling, plan.depth)
    path, accepted_len = follow(tree, posterior, plan.depth)
    tokens = jnp.take_along_axis(posterior, path, axis=1)
    limit = jnp.minimum(accepted_len, state.remaining)
    emitted_len, stopped = cut_at_stop(tokens, limit, state.sampling.stop_ids)
    last = jnp.maximum(emitted_len - 1, 0)[:, None]
    bonus_token = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    return Accepted(
        path=path,
        accepted_len=jnp.where(state.is_active, accepted_len, 0),
        tokens=tokens,
        emitted_len=emitted_len,
        bonus_token=jnp.where(state.is_active, bonus_token, state.anchor),
        remaining=jnp.where(stopped, 0, state.remaining - emitted_len),
    )


def follow(tree: Tree, posterior: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
    """Returns the accepted nodes, int32 [b, depth + 1] padded with 0, and their number [b].

    Args:
      tree: batched, [b, n].
      posterior: int32 [b, n], the target's choice at each node.
    """
    parent_choice = jnp.take_along_axis(posterior, jnp.maximum(tree.parent, 0), axis=1)
    is_root = jnp.arange(tree.parent.shape[1]) == 0
    holds = tree.valid & (is_root | (tree.token_ids == parent_choice))
    broken = tree.ancestors & ~pack_bits(holds)[:, None]
    accepted = tree.valid & (broken == 0).all(axis=-1)
    at_depth = tree.depth[:, None] == jnp.arange(depth + 1)[:, None]
    path = jnp.argmax(accepted[:, None] & at_depth, axis=-1)
    return path.astype(jnp.int32), accepted.sum(axis=-1, dtype=jnp.int32)


def cut_at_stop(
    tokens: jax.Array, limit: jax.Array, stop_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns how many tokens count, int32 [b], and whether a stop id was met (it counts too).

    Args:
      tokens: int32 [b, t].
      limit: int32 [b], tokens to look at.
      stop_ids: int32 [b, m], padded with -1.
    """
    is_stop = (tokens[..., None] == stop_ids[:, None]).any(axis=-1)
    is_stop &= jnp.arange(tokens.shape[1]) < limit[:, None]
    stopped = is_stop.any(axis=1)
    first = jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1
    return jnp.where(stopped, first, limit), stopped
