"""The rows of each step under an automatic budget: those that promise most tokens a millisecond.

Nodes stand in a tree in descending probability, so that the first rows of the largest tree are the
tree of every smaller width, and a running sum of probabilities is what each of them promises. The
drafter's confidence stands for the odds of acceptance as in EAGLE-2 (arXiv 2406.16858), put right
by the share of what was promised that came; that the best tree depends on the measured time of its
width is from Sequoia (arXiv 2402.12374). Both choose once for all steps, here each step chooses.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32

from k26jax.spec.tree import Tree, ancestor_mask

# Of both sums of nodes this share is forgotten with every draft; until enough have come, so many
# nodes count as having come as promised.
_FORGOTTEN = 1 / 32
_TRUSTED_NODES = 8.0
# Weight of the newest draft in the running gain, and plain steps until a draft is tried again.
_NEWEST = 1 / 8
_PLAIN_STEPS = 15
NEVER = 1e30
"""Milliseconds of a choice that is never to be made."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AutoWidth:
    """What steps cost, and what drafts were worth lately.

    Choice 0 is plain decoding: one row and no draft. Choice i is a draft and the i-th width.

    contexts: tokens in the cache at which costs were measured, ascending.
    milliseconds: of a step.
    promised: nodes below the root that the tries should have accepted by the drafter's
        probabilities, a sum that slowly forgets.
    accepted: those that were, likewise.
    gain: by how many tokens a step with a draft is ahead of plain steps of the same time, for each
        active slot; a running mean.
    waited: plain steps since the last draft.
    rows: of the last step.
    """

    contexts: Float32[Array, "point"]
    milliseconds: Float32[Array, "point choice"]
    promised: Float32[Array, ""]
    accepted: Float32[Array, ""]
    gain: Float32[Array, ""]
    waited: Int32[Array, ""]
    rows: Int32[Array, ""]

    @classmethod
    def of(cls, contexts: ArrayLike, milliseconds: ArrayLike) -> Self:
        """Returns the record before any step; the first one drafts."""
        # An array each: a buffer cannot be donated twice.
        return cls(
            contexts=jnp.array(contexts, jnp.float32),
            milliseconds=jnp.array(milliseconds, jnp.float32),
            promised=jnp.zeros((), jnp.float32),
            accepted=jnp.zeros((), jnp.float32),
            gain=jnp.ones((), jnp.float32),
            waited=jnp.zeros((), jnp.int32),
            rows=jnp.zeros((), jnp.int32),
        )


class Choice(NamedTuple):
    """One step's choice, for all slots alike.

    index: 0: plain decoding, else that of a width, from 1 on.
    rows: of the verification.
    promised: nodes below the root that are likely to be accepted, of all slots; not put right.
    gain: tokens that it promises, put right, less those of plain steps in its time, for each slot.
    """

    index: Int32[Array, ""]
    rows: Int32[Array, ""]
    promised: Float32[Array, ""]
    gain: Float32[Array, ""]


def step_costs(auto: AutoWidth, length: Int32[Array, ""]) -> Float32[Array, "choice"]:
    """Returns the milliseconds of each choice at a context, between and beyond those measured."""
    gaps = jnp.diff(auto.contexts)
    part = jnp.clip((length - auto.contexts[:-1]) / gaps, 0, 1)
    return auto.milliseconds[0] + (part[:, None] * jnp.diff(auto.milliseconds, axis=0)).sum(0)


def wants_draft(auto: AutoWidth, costs: Float32[Array, "choice"]) -> jax.Array:
    """Returns whether to draft: it has paid lately, or has not been tried for a while."""
    return ((auto.gain > 0) | (auto.waited >= _PLAIN_STEPS)) & (costs[1:].min() < NEVER)


def promised_nodes(
    log_probs: Float32[Array, "b depth k"],
    token_ids: Int32[Array, "b depth k"],
    tree: Tree,
    widths: tuple[int, ...],
) -> Float32[Array, "b width"]:
    """Returns how many nodes below the root each width's tree is likely to have accepted.

    A node is accepted with its whole path, which the drafter takes to be as probable as the
    product of its tokens; the sum over nodes is the expected depth.

    Args:
      log_probs, token_ids: the table that the tree was built from.
      tree: of the largest width.
    """
    row = jnp.maximum(tree.depth - 1, 0)[..., None]
    is_token = jnp.take_along_axis(token_ids, row, axis=1) == tree.token_ids[..., None]
    at_depth = jnp.take_along_axis(log_probs, row, axis=1)
    own = jnp.where(is_token, jnp.minimum(at_depth, 0), 0).sum(-1)
    is_node = tree.valid & (tree.parent >= 0)
    own = jnp.where(is_node, own, 0)
    path = jnp.where(ancestor_mask(tree), own[:, None, :], 0).sum(-1)
    probability = jnp.where(is_node, jnp.exp(path), 0)
    return jnp.stack([probability[:, :width].sum(-1) for width in widths], axis=-1)


def choose_width(
    auto: AutoWidth,
    costs: Float32[Array, "choice"],
    drafts: jax.Array,
    promised: Float32[Array, "b width"],
    remaining: Int32[Array, "b"],
    widths: tuple[int, ...],
) -> Choice:
    """Returns the choice of the most tokens a millisecond, of all slots together.

    Args:
      drafts: whether there is a draft; without one the choice is plain decoding.
      remaining: tokens that each slot may still emit; a slot without any does not count.
    """
    right = (auto.accepted + _TRUSTED_NODES) / (auto.promised + _TRUSTED_NODES)
    tokens = jnp.minimum(1 + right * promised, remaining[:, None]).sum(0)
    best = jnp.argmax(tokens / costs[1:]).astype(jnp.int32)
    index = jnp.where(drafts, best + 1, 0)
    active = remaining > 0
    return Choice(
        index=index,
        rows=jnp.where(drafts, jnp.asarray(widths, jnp.int32)[best], 1),
        promised=jnp.where(active, promised[:, best], 0).sum(),
        gain=tokens[best] / jnp.maximum(active.sum(), 1) - costs[index] / costs[0],
    )


def learn(auto: AutoWidth, choice: Choice, accepted_len: Int32[Array, "b"]) -> AutoWidth:
    """Returns the record after a step.

    Args:
      accepted_len: nodes accepted, the root included; 0 for an idle slot.
    """
    drafted = choice.index > 0
    kept = jnp.where(drafted, 1 - _FORGOTTEN, 1)
    nodes = jnp.maximum(accepted_len - 1, 0).sum().astype(jnp.float32)
    return replace(
        auto,
        promised=kept * auto.promised + jnp.where(drafted, choice.promised, 0),
        accepted=kept * auto.accepted + nodes,
        gain=auto.gain + jnp.where(drafted, _NEWEST * (choice.gain - auto.gain), 0),
        waited=jnp.where(drafted, 0, auto.waited + 1),
        rows=choice.rows,
    )
