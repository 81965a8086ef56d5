"""Stage draft: one pass of the block drafter gives a table of likely tokens for every depth."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from k26jax.config import Algorithm
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models, SpecState
from k26jax.spec.tree import draft_table


class DraftLogProbs(NamedTuple):
    """The drafter's most likely tokens, depth by depth.

    log_probs: descending along k.
    token_ids: of the same tokens.
    """

    log_probs: Float32[Array, "b depth k"]
    token_ids: Int32[Array, "b depth k"]


def draft(models: Models, state: SpecState, plan: Plan) -> DraftLogProbs | None:
    """Returns the table a tree is built from; None under plain decoding.

    The block is the anchor and mask tokens; row j speaks of position length + j. Rows the tree
    cannot reach are not sent through the head.
    """
    if models.drafter is None or state.draft_cache is None or not plan.drafts:
        return None
    config = models.drafter.config
    batch = state.anchor.shape[0]
    masks = jnp.full((batch, plan.block_size - 1), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([state.anchor[:, None], masks], axis=1)
    hidden = models.drafter.block(
        models.target.embed(block), state.draft_cache, state.length, plan.kernels
    )
    first = 0 if config.sample_from_anchor else 1
    logits = models.target.logits(hidden[:, first : first + plan.depth], plan.kernels)
    candidates = 1 if plan.algorithm is Algorithm.DFLASH else plan.budget
    return DraftLogProbs(*draft_table(logits, candidates, plan.kernels))
