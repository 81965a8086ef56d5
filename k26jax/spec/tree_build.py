"""Stage tree_build: the tree a step verifies; the three algorithms differ here and nowhere else."""

import jax
from jaxtyping import Array, Float32, Int32

from k26jax.config import Algorithm
from k26jax.pallas.tree_build import build
from k26jax.spec.draft import DraftLogProbs
from k26jax.spec.plan import Plan
from k26jax.spec.tree import Tree, build_tree, chain_tree, root_tree


def tree_build(log_probs: DraftLogProbs | None, anchor: Int32[Array, "b"], plan: Plan) -> Tree:
    """Returns one tree a slot, of `plan.width` rows, rooted at the anchors."""
    if log_probs is None:
        return jax.vmap(lambda token: root_tree().with_root(token))(anchor)
    if plan.kernels == "pallas" and plan.algorithm is Algorithm.DDTREE:
        return Tree(*build(*log_probs, anchor, plan.budget, kernels=plan.kernels))

    def one(
        log_probs: Float32[Array, "depth k"],
        token_ids: Int32[Array, "depth k"],
        token: Int32[Array, ""],
    ) -> Tree:
        if plan.algorithm is Algorithm.DFLASH:
            return chain_tree(token_ids[:, 0]).with_root(token)
        return build_tree(log_probs, token_ids, plan.budget).with_root(token)

    return jax.vmap(one)(*log_probs, anchor)
