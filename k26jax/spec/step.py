"""The decoding step: draft, tree_build, verify, accept, compact; and many steps in one dispatch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from k26jax.spec.accept import Accepted, accept
from k26jax.spec.auto_step import auto_step
from k26jax.spec.compact import compact
from k26jax.spec.draft import draft
from k26jax.spec.extras import adjust_nodes, count, tell
from k26jax.spec.log_probs import LogProbs
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models, SpecState
from k26jax.spec.tree import Tree
from k26jax.spec.tree_build import tree_build
from k26jax.spec.verify import verify


def step(models: Models, state: SpecState, plan: Plan) -> tuple[SpecState, Tree, Accepted]:
    """Returns the state one step on, with the tree it tried and what was accepted of it.

    Plain decoding, the DFlash chain and DDTree differ in the tree alone; the tokens are the same.
    """
    if plan.widths:
        return auto_step(models, state, plan)
    with jax.named_scope("draft"):
        log_probs = draft(models, state, plan)
    with jax.named_scope("tree_build"):
        tree = tree_build(log_probs, state.anchor, plan)
    with jax.named_scope("verify"):
        tree_logits = verify(models, tree, state, plan)
    with jax.named_scope("accept"):
        accepted = accept(tree, adjust_nodes(tree, tree_logits.logits, state, plan), state, plan)
        accepted = tell(tree_logits.logits, accepted, state, plan)
        state = count(state, accepted, plan)
    with jax.named_scope("compact"):
        state = compact(models, state, tree_logits.rows, accepted, plan.kernels)
    return state, tree, accepted


class Steps(NamedTuple):
    """What several steps emitted; rows past n_run are zero.

    n_run: steps that were run.
    tokens, emitted_len, accepted_len: as in `Accepted`.
    rows: of each step's verification, where steps choose them; else None.
    trees, paths: the trees tried and the accepted nodes, if recorded.
    log_probs: as in `Accepted`.
    """

    n_run: Int32[Array, ""]
    tokens: Int32[Array, "step b path"]
    emitted_len: Int32[Array, "step b"]
    accepted_len: Int32[Array, "step b"]
    rows: Int32[Array, "step"] | None
    trees: Tree | None
    paths: Int32[Array, "step b path"] | None
    log_probs: LogProbs | None = None


def run_steps(
    models: Models,
    state: SpecState,
    plan: Plan,
    n_steps: int,
    *,
    limit: jax.Array | int | None = None,
    record_trees: bool = False,
) -> tuple[SpecState, Steps]:
    """Returns the state up to `n_steps` steps on; stops early once no slot is active.

    Args:
      limit: steps to run this time, traced, at most n_steps; None: n_steps.

    Donates: `state`, where the caller is jitted with it donated.
    """

    def one(state: SpecState) -> tuple[SpecState, tuple]:
        state, tree, accepted = step(models, state, plan)
        rows = None if state.auto is None else state.auto.rows
        record = (accepted.tokens, accepted.emitted_len, accepted.accepted_len, rows)
        record += (tree, accepted.path) if record_trees else (None, None)
        return state, (*record, accepted.log_probs)

    def body(carry: tuple) -> tuple:
        done, state, records = carry
        state, record = one(state)
        records = jax.tree.map(lambda all_, new: all_.at[done].set(new), records, record)
        return done + 1, state, records

    shapes = jax.eval_shape(one, state)[1]
    empty = jax.tree.map(lambda x: jnp.zeros((n_steps, *x.shape), x.dtype), shapes)
    limit = n_steps if limit is None else jnp.minimum(limit, n_steps)
    n_run, state, records = lax.while_loop(
        lambda carry: (carry[0] < limit) & carry[1].is_active.any(),
        body,
        (jnp.int32(0), state, empty),
    )
    return state, Steps(n_run, *records)
