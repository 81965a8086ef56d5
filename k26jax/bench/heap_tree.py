"""The way published DDTree code builds a tree, a heap on the host: a peer to time."""

import heapq
import time

import numpy as np


def heap_tree(log_probs: np.ndarray, budget: int) -> list[tuple[int, int, int]]:
    """Returns the nodes in the order they are chosen: parent node (-1: the root), depth, rank.

    A node's best child and its next sibling enter the heap when it leaves it (DDTree, section 3).

    Args:
      log_probs: [depth, rank], falling along the ranks.
    """
    depths, width = log_probs.shape
    rows = log_probs.tolist()
    nodes: list[tuple[int, int, int]] = []
    heap: list[tuple[float, tuple[int, ...], int]] = [(-rows[0][0], (0,), -1)]
    while heap and len(nodes) < budget:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        nodes.append((parent, depth, rank))
        if rank + 1 < width:
            sibling = cost + rows[depth][rank] - rows[depth][rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1), parent))
        if depth + 1 < depths:
            child = cost - rows[depth + 1][0]
            heapq.heappush(heap, (child, (*ranks, 0), len(nodes) - 1))
    return nodes


def heap_seconds(tables: np.ndarray, budget: int, repeats: int = 25) -> float:
    """Returns the median seconds to build one tree for each of the tables [slot, depth, rank]."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for table in tables:
            heap_tree(table, budget)
        times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2]
