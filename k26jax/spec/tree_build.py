"""Stage tree_build: the tree a step verifies; the three algorithms differ here and nowhere else."""

from __future__ import annotations

import jax

from k26jax.config import Algorithm
from k26jax.spec.draft import DraftLogProbs
from k26jax.spec.plan import Plan
from k26jax.spec.tree import Tree, build_tree, chain_tree, root_tree


def tree_build(log_probs: DraftLogProbs | None, anchor: jax.Array, plan: Plan) -> Tree:
    """Returns one tree a slot, [b, width], rooted at the anchors.

    Args:
      anchor: int32 [b].
    """
    if log_probs is None:
        return jax.vmap(lambda token: root_tree().with_root(token))(anchor)

    def one(log_probs: jax.Array, token_ids: jax.Array, token: jax.Array) -> Tree:
        if plan.algorithm is Algorithm.DFLASH:
            return chain_tree(token_ids[:, 0]).with_root(token)
        return build_tree(log_probs, token_ids, plan.budget).with_root(token)

    return jax.vmap(one)(*log_probs, anchor)
