"""Stage accept: follows the target's own choices down the tree, without a loop."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k26jax.pallas.bits import pack_bits
from k26jax.spec.log_probs import LogProbs
from k26jax.spec.plan import Plan
from k26jax.spec.sampling import choose
from k26jax.spec.state import SpecState
from k26jax.spec.tree import Tree


class Accepted(NamedTuple):
    """The path that agreed with the target, and what it emits.

    path: accepted nodes from the root down, as many as the depth and one; padding: 0.
    accepted_len: nodes on the path, the root included; before any limit.
    tokens: the tokens emitted: those below the root, then the bonus token.
    emitted_len: how many of them count: up to the first stop id, at most what the slot may emit,
        0 for an idle slot. Also the nodes of the path that become committed.
    bonus_token: the last emitted token: the next anchor.
    remaining: tokens the slot may emit after these; 0 once it is done.
    log_probs: of `tokens`, for slots that ask for them; None in a program without extras.
    """

    path: Int32[Array, "b path"]
    accepted_len: Int32[Array, "b"]
    tokens: Int32[Array, "b path"]
    emitted_len: Int32[Array, "b"]
    bonus_token: Int32[Array, "b"]
    remaining: Int32[Array, "b"]
    log_probs: LogProbs | None = None


def accept(tree: Tree, logits: Float32[Array, "b t w"], state: SpecState, plan: Plan) -> Accepted:
    """Returns the accepted path and its tokens.

    A node holds if its token is what the target chose at its parent; it is accepted if it and all
    its ancestors hold. The target's choices at rejected nodes influence nothing.

    Args:
      tree: one tree a slot.
    """
    posterior = choose(logits, state.length, tree.depth, state.sampling, plan.depth, plan.kernels)
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


def follow(
    tree: Tree, posterior: Int32[Array, "b t"], depth: int
) -> tuple[Int32[Array, "b {depth}+1"], Int32[Array, "b"]]:
    """Returns the accepted nodes from the root down, padded with 0, and their number.

    Args:
      tree: one tree a slot.
      posterior: the target's choice at each node.
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
    tokens: Int32[Array, "b path"], limit: Int32[Array, "b"], stop_ids: Int32[Array, "b stops"]
) -> tuple[Int32[Array, "b"], Bool[Array, "b"]]:
    """Returns how many tokens count, and whether a stop id was met (it counts too).

    Args:
      limit: tokens to look at.
      stop_ids: padded with -1.
    """
    is_stop = (tokens[..., None] == stop_ids[:, None]).any(axis=-1)
    is_stop &= jnp.arange(tokens.shape[1]) < limit[:, None]
    stopped = is_stop.any(axis=1)
    first = jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1
    return jnp.where(stopped, first, limit), stopped
