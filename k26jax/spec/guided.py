"""The decoding step in two programs, where the host says between them what may come at each node.

`propose` gives the trees, the host makes a mask for every node, `settle` does the rest of the step.
The stages are those of `spec/step.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from k26jax.spec.accept import Accepted, accept
from k26jax.spec.compact import compact
from k26jax.spec.draft import draft
from k26jax.spec.extras import adjust_nodes, count, tell
from k26jax.spec.masks import all_allowed, mask_logits
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models, SpecState
from k26jax.spec.step import Steps
from k26jax.spec.tree import Tree, build_tree
from k26jax.spec.tree_build import tree_build
from k26jax.spec.verify import verify


def propose(models: Models, state: SpecState, plan: Plan) -> Tree:
    """Returns one tree a slot; the state stays as it is."""
    with jax.named_scope("draft"):
        log_probs = draft(models, state, plan)
    with jax.named_scope("tree_build"):
        return tree_build(log_probs, state.anchor, plan)


def settle(
    models: Models,
    state: SpecState,
    tree: Tree,
    allowed: UInt32[Array, "b t bits"],
    plan: Plan,
) -> tuple[SpecState, Accepted]:
    """Returns the state one step on and what was accepted of the trees that `propose` gave.

    Args:
      allowed: what may come after each node, as `mask_logits` takes it.
    """
    with jax.named_scope("verify"):
        tree_logits = verify(models, tree, state, plan)
    with jax.named_scope("accept"):
        logits = adjust_nodes(tree, tree_logits.logits, state, plan)
        accepted = accept(tree, mask_logits(logits, allowed), state, plan)
        accepted = tell(tree_logits.logits, accepted, state, plan)
        state = count(state, accepted, plan)
    with jax.named_scope("compact"):
        state = compact(models, state, tree_logits.rows, accepted, plan.kernels)
    return state, accepted


def blank_between(slots: int, plan: Plan, vocab_size: int) -> tuple[Tree, np.ndarray]:
    """Returns trees of the root alone, of which only the shapes matter, and masks of all tokens."""

    def root_of(token: jax.Array) -> Tree:
        table = jnp.zeros((1, 0))
        return build_tree(table, table.astype(jnp.int32), plan.budget).with_root(token)

    trees = jax.eval_shape(jax.vmap(root_of), np.zeros(slots, np.int32))
    return trees, all_allowed(slots, plan.width, vocab_size=vocab_size)


def as_steps(accepted: Accepted, trees: Tree | None) -> Steps:
    """Returns one step, on the host, as a dispatch gives it; with its trees if they are wanted."""
    first: Any = jax.tree.map(lambda x: np.asarray(x)[None], (accepted, trees))
    accepted, trees = first
    return Steps(
        n_run=np.int32(1),  # type: ignore[arg-type]
        tokens=accepted.tokens,
        emitted_len=accepted.emitted_len,
        accepted_len=accepted.accepted_len,
        rows=None,
        trees=trees,
        paths=None if trees is None else accepted.path,
        log_probs=accepted.log_probs,
    )
