"""What requests ask for besides tokens: logits adjusted before the choice, log-probabilities after.

A step's program has extras or has not (`Plan.has_extras`); a prefill always has them.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from k26jax.spec.accept import Accepted
from k26jax.spec.adjust import Adjustments, adjust, lineage
from k26jax.spec.log_probs import LogProbs, log_probs_of
from k26jax.spec.masks import mask_logits
from k26jax.spec.plan import Plan
from k26jax.spec.sampling import choose
from k26jax.spec.state import Sampling, SpecState
from k26jax.spec.tree import Tree


def adjust_nodes(
    tree: Tree, logits: Float32[Array, "b t w"], state: SpecState, plan: Plan
) -> Float32[Array, "b t w"]:
    """Returns the logits of all nodes as their slots adjust them; the same ones without extras.

    Args:
      tree: one tree a slot.
    """
    if not plan.has_extras:
        return logits
    return adjust(
        logits,
        state.adjustments,
        state.sampling.stop_ids,
        lineage(tree, plan.depth),
        tree.depth,
        state.length[:, None] + tree.depth + 1,
    )


def tell(
    logits: Float32[Array, "b t w"], accepted: Accepted, state: SpecState, plan: Plan
) -> Accepted:
    """Returns what was accepted with its log-probabilities; as it is without extras.

    Args:
      logits: of all nodes, as the target gave them.
    """
    if not plan.has_extras:
        return accepted
    log_probs = log_probs_of(
        logits, accepted.path, accepted.tokens, state.sampling.tells_log_probs, plan.kernels
    )
    return accepted._replace(log_probs=log_probs)


def count(state: SpecState, accepted: Accepted, plan: Plan) -> SpecState:
    """Returns the state with the emitted tokens counted; as it is without extras."""
    if not plan.has_extras:
        return state
    slots = jnp.arange(state.anchor.shape[0])
    counted = state.adjustments.emitted(slots, accepted.tokens, accepted.emitted_len)
    return dataclasses.replace(state, adjustments=counted)


def choose_first(
    logits: Float32[Array, "w"],
    position: Int32[Array, ""],
    slot: Int32[Array, ""],
    is_last: Bool[Array, ""],
    sampling: Sampling,
    adjustments: Adjustments,
    allowed: UInt32[Array, "bits"] | None = None,
) -> tuple[Int32[Array, ""], LogProbs, Adjustments]:
    """Returns the token after a prompt, its log-probabilities, and the adjustments that count it.

    Args:
      position: of the token.
      is_last: whether the prompt is whole; if not, the token is none.
      sampling: of the request, one row.
      adjustments: of all slots; the request's own are set already.
      allowed: the tokens that it may be, as `mask_logits` takes them; None: all.
    """
    rows, zero = logits[None, None], jnp.zeros((1, 1), jnp.int32)
    path = jnp.zeros((1, 1, 0), jnp.int32)
    own = adjustments.of(slot)
    adjusted = adjust(rows, own, sampling.stop_ids, path, zero, position[None, None])
    if allowed is not None:
        adjusted = mask_logits(adjusted, allowed[None, None])
    token = choose(adjusted, position[None] - 1, zero, sampling, 0)
    log_probs = log_probs_of(rows, zero, token, sampling.tells_log_probs & is_last)
    counted = adjustments.emitted(slot[None], token, is_last[None].astype(jnp.int32))
    return token[0, 0], log_probs, counted
