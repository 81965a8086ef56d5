"""What requests ask for besides tokens: logits adjusted before the choice, log-probabilities after.

A step's program has extras or has not (`Plan.has_extras`); a prefill always has them.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from k26jax.spec.accept import Accepted, accept
from k26jax.spec.adjust import Adjustments, adjust, lineage
from k26jax.spec.log_probs import LogProbs, log_probs_of
from k26jax.spec.plan import Plan
from k26jax.spec.sampling import choose
from k26jax.spec.state import Sampling, SpecState
from k26jax.spec.tree import Tree


def accept_with_extras(
    tree: Tree, logits: Float32[Array, "b t w"], state: SpecState, plan: Plan
) -> tuple[SpecState, Accepted]:
    """Returns the state with its emitted tokens counted, and what was accepted.

    Each slot's tokens are chosen from its logits as it adjusts them; log-probabilities are those
    of the logits as they came. Without extras it is `accept` alone.

    Args:
      tree: one tree a slot.
    """
    if not plan.has_extras:
        return state, accept(tree, logits, state, plan)
    adjusted = adjust(
        logits,
        state.adjustments,
        state.sampling.stop_ids,
        lineage(tree, plan.depth),
        tree.depth,
        state.length[:, None] + tree.depth + 1,
    )
    accepted = accept(tree, adjusted, state, plan)
    log_probs = log_probs_of(
        logits, accepted.path, accepted.tokens, state.sampling.tells_log_probs, plan.kernels
    )
    slots = jnp.arange(state.anchor.shape[0])
    counted = state.adjustments.emitted(slots, accepted.tokens, accepted.emitted_len)
    state = dataclasses.replace(state, adjustments=counted)
    return state, accepted._replace(log_probs=log_probs)


def choose_first(
    logits: Float32[Array, "w"],
    position: Int32[Array, ""],
    slot: Int32[Array, ""],
    is_last: Bool[Array, ""],
    sampling: Sampling,
    adjustments: Adjustments,
) -> tuple[Int32[Array, ""], LogProbs, Adjustments]:
    """Returns the token after a prompt, its log-probabilities, and the adjustments that count it.

    Args:
      position: of the token.
      is_last: whether the prompt is whole; if not, the token is none.
      sampling: of the request, one row.
      adjustments: of all slots; the request's own are set already.
    """
    rows, zero = logits[None, None], jnp.zeros((1, 1), jnp.int32)
    path = jnp.zeros((1, 1, 0), jnp.int32)
    own = adjustments.of(slot)
    adjusted = adjust(rows, own, sampling.stop_ids, path, zero, position[None, None])
    token = choose(adjusted, position[None] - 1, zero, sampling, 0)
    log_probs = log_probs_of(rows, zero, token, sampling.tells_log_probs & is_last)
    counted = adjustments.emitted(slot[None], token, is_last[None].astype(jnp.int32))
    return token[0, 0], log_probs, counted
