"""The decoding step under an automatic budget: the same stages, around a choice of their size."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from k26jax.spec.accept import Accepted, accept
from k26jax.spec.auto_width import choose_width, learn, promised_nodes, step_costs, wants_draft
from k26jax.spec.compact import PathRows, commit_accepted, path_rows
from k26jax.spec.draft import draft
from k26jax.spec.extras import adjust_nodes, count, tell
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models, SpecState
from k26jax.spec.tree import Tree, root_tree
from k26jax.spec.tree_build import tree_build
from k26jax.spec.verify import verify


def auto_step(models: Models, state: SpecState, plan: Plan) -> tuple[SpecState, Tree, Accepted]:
    """Returns the state one step on, the tree it tried and what was accepted; see `step`.

    The device alone chooses: whether to draft, and then how many rows of the largest tree go
    through the target, which is compiled for each width. A row's result does not depend on the
    number of rows, so the tokens do not depend on the choice.

    Cost: a program with one target pass a width; the caches are written behind the choice.
    """
    auto = state.auto
    assert auto is not None
    costs = step_costs(auto, jnp.where(state.is_active, state.length, 0).max())
    drafts = wants_draft(auto, costs)
    tree, promised = lax.cond(
        drafts,
        functools.partial(_drafted, models, plan),
        functools.partial(_undrafted, plan),
        state,
    )
    choice = choose_width(auto, costs, drafts, promised, state.remaining, plan.widths)
    tries = [functools.partial(_tried, models, plan, width) for width in plan.widths]
    accepted, taken = lax.switch(jnp.maximum(choice.index - 1, 0), tries, tree, state)
    state = count(state, accepted, plan)
    with jax.named_scope("compact"):
        state = commit_accepted(models, state, taken, accepted, plan.kernels)
    is_tried = jnp.arange(plan.width) < choice.rows
    auto = learn(auto, choice, accepted.accepted_len)
    return replace(state, auto=auto), replace(tree, valid=tree.valid & is_tried), accepted


def _drafted(
    models: Models, plan: Plan, state: SpecState
) -> tuple[Tree, Float32[Array, "b width"]]:
    """Returns the largest tree, and what each width promises."""
    with jax.named_scope("draft"):
        table = draft(models, state, plan)
    assert table is not None
    with jax.named_scope("tree_build"):
        tree = tree_build(table, state.anchor, plan)
        return tree, promised_nodes(*table, tree, plan.widths)


def _undrafted(plan: Plan, state: SpecState) -> tuple[Tree, Float32[Array, "b width"]]:
    """Returns the root alone, in the shapes of `_drafted`."""
    tree = jax.vmap(lambda token: root_tree(plan.width).with_root(token))(state.anchor)
    return tree, jnp.zeros((state.anchor.shape[0], len(plan.widths)), jnp.float32)


def _tried(
    models: Models, plan: Plan, width: int, tree: Tree, state: SpecState
) -> tuple[Accepted, PathRows]:
    """Returns what is accepted of a tree's first rows, and the path's rows, both as long as
    those of the largest tree."""
    plan, depth = plan.of_width(width), plan.depth
    tree = jax.tree.map(lambda x: x[:, :width], tree)
    tree = replace(tree, ancestors=tree.ancestors[..., : -(-width // 32)])
    with jax.named_scope("verify"):
        logits, rows = verify(models, tree, state, plan)
    with jax.named_scope("accept"):
        accepted = accept(tree, adjust_nodes(tree, logits, state, plan), state, plan)
        accepted = tell(logits, accepted, state, plan)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, depth - plan.depth), *[(0, 0)] * (x.ndim - 2)))

    accepted = accepted._replace(
        path=padded(accepted.path),
        tokens=padded(accepted.tokens),
        log_probs=jax.tree.map(padded, accepted.log_probs),
    )
    return accepted, path_rows(rows, accepted)
