"""Builds draft trees of fixed width from a drafter's log-probabilities (stage tree_build).

A tree is the `budget` most probable prefixes of the product of the drafter's rows, in the total
order (-sum of log-probs, tuple of ranks), a prefix before its extensions: what the best-first
search of the DDTree paper pops from its heap. The builder knows neither target, cache nor
acceptance.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from k26jax.errors import ConfigError
from k26jax.pallas.tree_build.cost import INFINITE, Cost, add, cost_of, nothing, where
from k26jax.pallas.vocab_topk import top_tokens
from k26jax.sharding.collectives import log_total_over_ranks, ranks, top_over_ranks
from k26jax.sharding.rules import MODEL

MAX_BUDGET = 254
MAX_DEPTH = 255

_LAST = 1 << 30  # beyond every lexicographic key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """A draft tree in n = budget + 1 rows: the root, then nodes in descending probability, padding.

    A parent stands before its children, and siblings have different tokens. With leading axes
    (from `jax.vmap`) it is a batch of trees.
    """

    token_ids: Int32[Array, "... t"]
    """Row 0 is the root token (0 until `with_root`), 0 in padding rows."""
    parent: Int32[Array, "... t"]
    """Row of the parent; -1 for the root and for padding."""
    depth: Int32[Array, "... t"]
    """Tokens below the root: 1..L, and 0 for the root and for padding."""
    valid: Bool[Array, "... t"]
    """True for the root and the nodes; padding is a suffix."""
    ancestors: UInt32[Array, "... t words"]
    """ceil(t / 32) words a row; bit j % 32 of word j // 32 of row i: row i sees row j, that is
    its ancestors and itself. A padding row sees only itself."""

    def with_root(self, token: jax.Array | int) -> Self:
        """Returns the tree with `token` (one a tree, if batched) in row 0."""
        token_ids = jnp.asarray(self.token_ids).at[..., 0].set(jnp.asarray(token, jnp.int32))
        return dataclasses.replace(self, token_ids=token_ids)


class _Ranked(NamedTuple):
    """The best prefixes among those no deeper than the current depth, in tree order, [budget]."""

    cost: Cost  # infinite in empty slots, which come last
    lex: jax.Array  # place of the rank tuple in lexicographic order among these prefixes
    parent: jax.Array  # slot of the parent; -1: the root
    depth: jax.Array
    rank: jax.Array  # rank of the last token within its row


def build_tree(log_probs: jax.Array, token_ids: jax.Array, budget: int) -> Tree:
    """Returns the tree of the `budget` most probable prefixes of a table of drafted tokens.

    Depth by depth, the best `budget` prefixes so far are merged with the extensions of those of
    the last depth. Extending prefix i of that depth by rank r can only pay if (i + 1)(r + 2) is
    within the budget: prefixes 0 to i and their extensions by ranks 0 to r come no later. A parent
    always comes before its extensions, so what drops out can never be needed again.

    Args:
      log_probs: [L, K] float32, each row descending; a positive value counts as 0. From the first
        entry of a row that is not finite on, the row has no candidates.
      token_ids: [L, K] int32, distinct within a row.
      budget: nodes without the root, static; 0 or less gives the root alone.

    Returns: `budget + 1` rows; fewer are valid if the table has fewer prefixes.
    Raises: ConfigError for a budget above 254, more than 255 rows or shapes that differ.
    Cost: for each of min(L, budget) depths a sort of about budget * ln(budget) candidates and
      budget^2 comparisons; no loop over nodes.
    """
    if budget > MAX_BUDGET:
        raise ConfigError(
            f"draft tree budget {budget} is too large: a tree has at most {MAX_BUDGET} nodes; "
            "lower the budget"
        )
    if log_probs.ndim != 2 or log_probs.shape != token_ids.shape:
        raise ConfigError(
            f"draft table has log_probs of shape {log_probs.shape} and token_ids of shape "
            f"{token_ids.shape}; expected one shape [depths, tokens]; use jax.vmap for a batch"
        )
    if log_probs.shape[0] > MAX_DEPTH:
        raise ConfigError(
            f"draft table has {log_probs.shape[0]} rows: a tree is at most {MAX_DEPTH} deep; "
            "draft a shorter block"
        )
    budget = max(budget, 0)
    depths, width = min(log_probs.shape[0], budget), min(log_probs.shape[1], budget)
    if depths == 0 or width == 0:
        return _root_only(budget + 1)
    table = _costs(log_probs[:depths, :width])
    ranked = _first_depth(table, budget)
    if depths > 1:
        ranked = _deeper(ranked, table)
    return _as_tree(ranked, token_ids)


def chain_tree(token_ids: Int[Array, "depth"]) -> Tree:
    """Returns the tree of `len(token_ids) + 1` rows whose only path is `token_ids`."""
    length = token_ids.shape[0]
    if length > MAX_DEPTH:
        raise ConfigError(
            f"draft chain has {length} tokens: a tree is at most {MAX_DEPTH} deep; "
            "draft a shorter block"
        )
    row = jnp.arange(length + 1, dtype=jnp.int32)
    tokens = jnp.concatenate([jnp.zeros(1, jnp.int32), token_ids.astype(jnp.int32)])
    return Tree(tokens, row - 1, row, row >= 0, _ancestor_bits(row - 1, length))


def root_tree(rows: int = 1) -> Tree:
    """Returns the tree of the root alone, plain decoding as a tree; other rows are padding."""
    return _root_only(rows)


def ancestor_mask(tree: Tree) -> Bool[Array, "... t t"]:
    """Returns whether row i sees row j: the unpacked bits of `tree.ancestors`."""
    rows = tree.token_ids.shape[-1]
    place = jnp.expand_dims(jnp.arange(32, dtype=jnp.uint32), range(tree.ancestors.ndim))
    bits = tree.ancestors[..., None] >> place & 1
    return bits.reshape(*bits.shape[:-2], -1)[..., :rows] != 0


def draft_table(
    logits: Float[Array, "*rows w"], budget: int, kernels: str = "reference"
) -> tuple[Float32[Array, "*rows k"], Int32[Array, "*rows k"]]:
    """Returns the log-probs and ids of the best min(budget, w) tokens a row, of all ranks.

    Args:
      logits: any float type, of this rank's tokens; all arithmetic is float32.
      budget: nodes without the root; a tree of that size looks at no further token.

    Returns: descending along k, equal logits by lowest id. Logits of -inf give -inf
      or NaN, which `build_tree` leaves out.
    """
    rows, width = logits.shape[:-1], logits.shape[-1]
    count = min(max(budget, 0), width * ranks(MODEL))
    if not count:
        return jnp.zeros((*rows, 0), jnp.float32), jnp.zeros((*rows, 0), jnp.int32)
    top = top_tokens(logits.reshape(-1, width), min(count, width), kernels=kernels)
    log_probs, ids = top.log_probs, top.ids
    if ranks(MODEL) > 1:
        ids, best = top_over_ranks(ids, top.logits, MODEL, width, count)
        log_probs = best - log_total_over_ranks(top.log_total, MODEL)[:, None]
    return log_probs.reshape(*rows, count), ids.reshape(*rows, count)


def _costs(log_probs: jax.Array) -> Cost:
    """Returns -log_probs, exactly, infinite from the first entry of a row that is not finite on."""
    cost = cost_of(log_probs.astype(jnp.float32))
    column = jnp.arange(log_probs.shape[1], dtype=jnp.int32)[None, :]
    ends = jnp.where(cost.high >= INFINITE, column, MAX_BUDGET).min(axis=1, keepdims=True)
    return where(column >= ends, nothing(cost.high), cost)


def _first_depth(table: Cost, budget: int) -> _Ranked:
    """Returns the prefixes of one token: the first row of the table, which is in order."""
    width = table.high.shape[1]
    slot = jnp.arange(budget, dtype=jnp.int32)
    empty = budget - width
    cost = Cost(
        jnp.pad(table.high[0], (0, empty), constant_values=INFINITE),
        jnp.pad(table.low[0], (0, empty)),
    )
    return _Ranked(cost, slot, jnp.full_like(slot, -1), jnp.full_like(slot, 1), slot)


def _deeper(ranked: _Ranked, table: Cost) -> _Ranked:
    """Returns the best prefixes of all depths, given those of depth 1."""
    budget, (depths, width) = ranked.lex.shape[0], table.high.shape
    half = budget // 2
    pairs = [(i, r) for i in range(half) for r in range(width) if (i + 1) * (r + 2) <= budget]
    which, rank = np.array(pairs, np.int32).T

    def step(state: tuple[_Ranked, jax.Array], row: tuple[Cost, jax.Array]):
        ranked, frontier = state
        last, depth = row
        parent = frontier[which]
        found = parent < budget
        parent = jnp.minimum(parent, budget - 1)
        cost = add(_take(ranked.cost, parent), _take(last, rank))
        cost = where(found, cost, nothing(cost.high))
        lex = ranked.lex[parent] * (width + 1) + rank + 1
        depth = jnp.full_like(parent, depth)
        return _merge(ranked, _Ranked(cost, lex, parent, depth, jnp.asarray(rank)), width), None

    rows = _take(table, slice(1, None)), jnp.arange(2, depths + 1, dtype=jnp.int32)
    (ranked, _), _ = lax.scan(step, (ranked, jnp.arange(half, dtype=jnp.int32)), rows)
    return ranked


def _merge(old: _Ranked, new: _Ranked, width: int) -> tuple[_Ranked, jax.Array]:
    """Returns the best of `old` and its extensions `new`, and the slots of the best extensions.

    One integer a prefix orders as its rank tuple: an old prefix has lex * (width + 1), and its
    extension by rank r has r + 1 more, which puts it before all that follows the old prefix. The
    slot of an extension that did not get in is `budget`.
    """
    budget = old.lex.shape[0]
    candidate = jnp.arange(new.lex.shape[0], dtype=jnp.int32)
    new_lex = jnp.where(new.cost.high < INFINITE, new.lex, _LAST + candidate)
    keys = (new.cost.high, new.cost.low, new_lex)
    *_, order = lax.sort((*keys, candidate), num_keys=len(keys), is_stable=False)
    new = _take(new._replace(lex=new_lex), order[: budget - 1])
    old = old._replace(lex=old.lex * (width + 1))

    before = _less(old, new)
    old_slot = jnp.arange(before.shape[0], dtype=jnp.int32) + _count(~before, 1)
    new_slot = jnp.arange(before.shape[1], dtype=jnp.int32) + _count(before, 0)
    old = old._replace(parent=jnp.where(old.parent < 0, -1, old_slot[old.parent]))
    new = new._replace(parent=old_slot[new.parent])
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), old, new)
    merged = _take(both, _inverse(jnp.concatenate([old_slot, new_slot]), budget))
    lex = _count(merged.lex[:, None] < merged.lex[None, :], 0)
    frontier = jnp.where(new.cost.high < INFINITE, jnp.minimum(new_slot, budget), budget)
    return merged._replace(lex=lex), frontier[: budget // 2]


def _less(a: _Ranked, b: _Ranked) -> jax.Array:
    """Returns [len(a), len(b)] bool: prefix i of a comes before prefix j of b."""
    a, b = _take(a, np.s_[:, None]), _take(b, np.s_[None, :])
    lower = (a.cost.low < b.cost.low) | ((a.cost.low == b.cost.low) & (a.lex < b.lex))
    return (a.cost.high < b.cost.high) | ((a.cost.high == b.cost.high) & lower)


def _inverse(position: jax.Array, count: int) -> jax.Array:
    """Returns for each position below `count` the index that has it.

    By comparing all pairs: XLA turns even a small scatter into a slow loop on the CPU.
    """
    index = jnp.arange(position.shape[0], dtype=jnp.int32)[None, :]
    hit = position[None, :] == jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(hit, index, 0), axis=1, dtype=jnp.int32)


def _count(mask: jax.Array, axis: int) -> jax.Array:
    """Returns the number of true entries along an axis, int32."""
    return jnp.sum(mask, axis=axis, dtype=jnp.int32)


def _take(record: Any, index: Any) -> Any:
    """Returns the record with every array indexed alike."""
    return jax.tree.map(lambda x: x[index], record)


def _as_tree(ranked: _Ranked, token_ids: jax.Array) -> Tree:
    """Returns the tree whose row j + 1 is the prefix in slot j."""
    budget = ranked.lex.shape[0]
    valid = ranked.cost.high < INFINITE
    tokens = token_ids[ranked.depth - 1, ranked.rank].astype(jnp.int32)
    parent = jnp.where(valid, ranked.parent + 1, -1)
    parent = jnp.pad(parent, (1, 0), constant_values=-1)
    return Tree(
        token_ids=jnp.pad(jnp.where(valid, tokens, 0), (1, 0)),
        parent=parent,
        depth=jnp.pad(jnp.where(valid, ranked.depth, 0), (1, 0)),
        valid=jnp.pad(valid, (1, 0), constant_values=True),
        ancestors=_ancestor_bits(parent, min(token_ids.shape[0], budget)),
    )


def _ancestor_bits(parent: jax.Array, depths: int) -> jax.Array:
    """Returns the words of `Tree.ancestors` for a tree at most `depths` deep, by doubling."""
    row = jnp.arange(parent.shape[0], dtype=jnp.int32)
    word = jnp.arange(-(-parent.shape[0] // 32), dtype=jnp.int32)[None, :]
    own = jnp.uint32(1) << (row % 32).astype(jnp.uint32)
    seen = jnp.where(word == row[:, None] // 32, own[:, None], 0)
    above = jnp.where(parent < 0, row, parent)
    for _ in range(depths.bit_length()):
        seen = seen | seen[above]
        above = above[above]
    return seen


def _root_only(rows: int) -> Tree:
    """Returns a tree of `rows` rows in which only the root is valid."""
    row = jnp.arange(rows, dtype=jnp.int32)
    parent = jnp.full_like(row, -1)
    zero = jnp.zeros_like(row)
    return Tree(zero, parent, zero, row == 0, _ancestor_bits(parent, 0))
