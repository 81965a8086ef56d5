"""How many tokens a step gives: the expected depth of what is accepted, from one measured figure.

A tree's expected tokens are one and, summed over its nodes, the probability that the target takes
the node's whole path; a best-first tree of B nodes holds the B most probable prefixes (DDTree).
"""

from __future__ import annotations

import heapq

from k26jax.errors import ConfigError

# Of what the drafter's best token misses, the next one takes a half, the next a quarter, ...
# Recall of a DFlash 2 drafter: 85.4 % with one token, 99.5 % with sixteen.
_FALL = 0.5


def chain_rate(accept_length: float, depth: int) -> float:
    """Returns the probability that a drafted token is the target's, if a chain gives so many.

    Args:
      accept_length: tokens a step of a chain of `depth` tokens, the bonus token included.

    Raises: ConfigError if no chain of that depth gives as many.
    """
    if not 1 <= accept_length <= depth + 1:
        raise ConfigError(
            f"accept length {accept_length:g}: a chain of {depth} drafted tokens gives 1 to "
            f"{depth + 1} tokens a step"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**d for d in range(depth + 1)) < accept_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def tree_accept_length(rate: float, depth: int, budget: int) -> float:
    """Returns the expected tokens of a step with a best-first tree of `budget` nodes.

    Every depth is taken to be alike: rank 0 is right with `rate`, rank r with half of what the
    ranks before left over.
    """

    def probability(rank: int) -> float:
        return rate if rank == 0 else (1 - rate) * _FALL**rank

    total, taken = 1.0, 0
    heap = [(-probability(0), 1, 0, 1.0)]  # of a prefix: probability, depth, rank, its parent's
    while heap and taken < budget:
        negative, at, rank, parent = heapq.heappop(heap)
        total -= negative
        taken += 1
        heapq.heappush(heap, (-parent * probability(rank + 1), at, rank + 1, parent))
        if at < depth:
            heapq.heappush(heap, (negative * probability(0), at + 1, 0, -negative))
    return total
