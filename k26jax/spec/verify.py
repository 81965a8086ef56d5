"""Stage verify: one target pass over all tree nodes at once."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32

from k26jax.model.mla import Context
from k26jax.model.target import Rows
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models, SpecState
from k26jax.spec.tree import Tree


class TreeLogits(NamedTuple):
    """What the target says at every node.

    logits: what the target says comes after each node.
    rows: cache rows and drafter features of the nodes, none of them committed yet.
    """

    logits: Float32[Array, "b t w"]
    rows: Rows


def verify(models: Models, tree: Tree, state: SpecState, plan: Plan) -> TreeLogits:
    """Returns the target's logits at each node, as if its root path had been decoded in turn.

    A node's position is the committed length plus its depth; it sees the committed tokens, its
    ancestors and itself. Nodes of idle slots use no expert.

    Args:
      tree: one tree a slot.
    """
    context = Context(
        cache=state.cache,
        slots=jnp.arange(state.anchor.shape[0]),
        lengths=state.length,
        ancestors=tree.ancestors,
    )
    rows = models.target.forward(
        tree.token_ids,
        state.length[:, None] + tree.depth,
        context,
        valid=tree.valid & state.is_active[:, None],
        taps=models.taps if plan.drafts else (),
        kernels=plan.kernels,
    )
    return TreeLogits(models.target.logits(rows.hidden, plan.kernels), rows)
