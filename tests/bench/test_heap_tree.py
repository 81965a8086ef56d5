"""The heap builder that tree_build is timed against builds the same trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from k26jax.bench.heap_tree import heap_tree
from k26jax.pallas import tree_build


@pytest.mark.parametrize(("depths", "width", "budget"), [(7, 16, 16), (3, 5, 40), (1, 4, 3)])
def test_the_same_nodes(depths, width, budget):
    """Multiples of 1/64 without ties between sums that matter are exact in both."""
    rng = np.random.default_rng(depths)
    steps = rng.integers(1, 4096, (depths, width)) / 4096
    table = -np.cumsum(steps, axis=1).astype(np.float32)
    nodes = heap_tree(table, budget)
    ids = jnp.arange(depths * width, dtype=jnp.int32).reshape(1, depths, width)
    tree = tree_build.build(jnp.asarray(table)[None], ids, jnp.zeros(1, jnp.int32), budget)
    found = [int(token) for token in np.asarray(tree.token_ids)[0, 1 : 1 + len(nodes)]]
    assert sorted(found) == sorted(depth * width + rank for _, depth, rank in nodes)


def test_no_node():
    assert heap_tree(np.zeros((2, 3)), 0) == []
