"""What the tests of draft trees share: compiled builders and the laws of every tree."""

import functools

import jax
import numpy as np
from spec.oracle import visibility

from k26jax.spec.tree import ancestor_mask, build_tree

# Tests share programs: tables are padded with -inf to DEPTHS rows, or more if they have more, and
# to one of these budgets; the first nodes of a larger tree are the smaller tree.
BUDGETS = (0, 1, 2, 3, 7, 16, 32, 64, 254)
DEPTHS = 15

mask_of = jax.jit(ancestor_mask)


@functools.lru_cache
def builder(budget, batched=False):
    build = functools.partial(build_tree, budget=budget)
    return jax.jit(jax.vmap(build) if batched else build)


def program_budget(budget):
    return next(b for b in BUDGETS if b >= min(budget, BUDGETS[-1]))


def padded(log_probs, token_ids, budget):
    """The table in the shape [DEPTHS, budget] that all tests of this budget share, or deeper."""
    log_probs, token_ids = np.asarray(log_probs, np.float32), np.asarray(token_ids, np.int32)
    depths, width = log_probs.shape[0], min(log_probs.shape[1], budget)
    shape = (max(DEPTHS, depths), budget)
    wide = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
    wide[0][:depths, :width] = log_probs[:, :width]
    wide[1][:depths, :width] = token_ids[:, :width]
    return wide


def build(log_probs, token_ids, budget):
    """The tree of a table of any shape; it may have more nodes than `budget`."""
    rows = program_budget(budget)
    return jax.device_get(builder(rows)(*padded(log_probs, token_ids, rows)))


def check_structure(tree):
    """The laws of every tree, whatever its table."""
    rows, nodes = len(tree.parent), int(tree.valid.sum())
    assert tree.valid[:nodes].all()
    assert tree.parent[0] == -1
    assert tree.depth[0] == 0
    parent = tree.parent[1:nodes]
    assert (parent >= 0).all()
    assert (parent < np.arange(1, nodes)).all()
    assert (tree.depth[1:nodes] == tree.depth[parent] + 1).all()
    assert (tree.parent[nodes:] == -1).all()
    assert (tree.token_ids[nodes:] == 0).all()
    assert (tree.depth[nodes:] == 0).all()
    siblings = list(zip(parent.tolist(), tree.token_ids[1:nodes].tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)  # spec test T51: no token twice under a parent
    assert tree.ancestors.shape == (rows, -(-rows // 32))
    words = tree.ancestors.astype("<u4").view(np.uint8)
    bits = np.unpackbits(words.reshape(rows, -1), axis=1, bitorder="little")
    assert not bits[:, rows:].any()
    np.testing.assert_array_equal(bits[:, :rows], visibility(tree.parent.tolist()))
    np.testing.assert_array_equal(np.asarray(mask_of(tree)), bits[:, :rows])
    dtypes = [x.dtype for x in jax.tree.leaves(tree)]
    assert dtypes == [np.int32, np.int32, np.int32, np.bool_, np.uint32]


def check_equal(tree, expected, budget):
    """The first `budget` nodes are those of the heap, in its order, and there are no others."""
    nodes = len(expected.tokens)
    assert min(int(tree.valid.sum()) - 1, budget) == nodes
    assert tree.token_ids[1 : nodes + 1].tolist() == list(expected.tokens)
    assert tree.depth[1 : nodes + 1].tolist() == list(expected.depths)
    assert tree.parent[: nodes + 1].tolist() == list(expected.parents)


def path_scores(tree, log_probs, token_ids):
    """The float64 sum of log-probs of each node, by its tokens' places in the table."""
    scores = [0.0]
    for node in range(1, int(tree.valid.sum())):
        row = tree.depth[node] - 1
        finite = np.isfinite(log_probs[row])
        (rank,) = np.flatnonzero((token_ids[row] == tree.token_ids[node]) & finite)
        scores.append(scores[tree.parent[node]] + float(log_probs[row, rank]))
    return np.array(scores[1:])
