"""Draft trees in plain Python: float64 and a heap, no code in common with the engine."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class HeapTree(NamedTuple):
    """Nodes in the order in which the heap gives them; only `parents` has an entry for the root."""

    tokens: list[int]
    depths: list[int]
    parents: list[int]
    scores: list[float]


def heap_tree(
    log_probs: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]], budget: int
) -> HeapTree:
    """Returns the tree of the DDTree paper's best-first search, sums in its order of operations.

    An entry that is not finite is no candidate, nor is anything after it in its row.
    """
    rows = [[float(x) for x in row] for row in log_probs]
    rows = [
        row[: next((r for r, x in enumerate(row) if not math.isfinite(x)), len(row))]
        for row in rows
    ]
    tree = HeapTree([], [], [-1], [])
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if rows and rows[0]:
        heap.append((-rows[0][0], (0,), 0))
    while heap and len(tree.tokens) < budget:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        tree.tokens.append(int(token_ids[depth - 1][rank]))
        tree.depths.append(depth)
        tree.parents.append(parent)
        tree.scores.append(-cost)
        row = rows[depth - 1]
        if rank + 1 < len(row):
            sibling = -cost - row[rank] + row[rank + 1]
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent))
        if depth < len(rows) and rows[depth]:
            child = -cost + rows[depth][0]
            heapq.heappush(heap, (-child, (*ranks, 0), len(tree.tokens)))
    return tree


def visibility(parents: Sequence[int]) -> np.ndarray:
    """Returns [n, n] bool, row sees column: each node itself and all on its way to the root."""
    visible = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        while parent >= 0:
            visible[node, parent] = True
            parent = parents[parent]
    return visible


def walk(
    tokens: Sequence[int], parents: Sequence[int], posterior: Sequence[int]
) -> tuple[list[int], int]:
    """Returns the accepted nodes from the root on, and the token that follows them.

    Args:
      tokens: token of each node, the root's included.
      posterior: the target's choice after each node.
    """
    edges = zip(parents, tokens, strict=True)
    children = {(parent, token): node for node, (parent, token) in enumerate(edges)}
    path = [0]
    while (child := children.get((path[-1], posterior[path[-1]]))) is not None:
        path.append(child)
    return path, posterior[path[-1]]


def table_of(logits: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns log-probs (float32) and ids of the best tokens a row, equal logits by lowest id."""
    logits = np.asarray(logits, np.float32)
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., : max(budget, 0)]
    top = np.take_along_axis(logits, ids, -1)
    peak = logits.max(-1, keepdims=True)
    log_z = peak + np.log(np.exp(logits - peak).sum(-1, keepdims=True, dtype=np.float32))
    return top - log_z, ids.astype(np.int32)
