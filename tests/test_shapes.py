"""Arrays that do not fit the annotations of the package are refused in every test run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from k26jax.model.cache import LatentCache
from k26jax.pallas.norm import append
from k26jax.pallas.router.reference import route
from k26jax.spec.accept import accept, cut_at_stop, follow
from k26jax.spec.adjust import Adjustments
from k26jax.spec.plan import Plan
from k26jax.spec.state import Sampling, SpecState
from k26jax.spec.tree import Tree, build_tree

PLAN = Plan.tree(budget=3, depth=2, block_size=3)


def _trees(count: int) -> Tree:
    log_probs = jnp.log(jnp.array([[0.6, 0.4], [0.7, 0.3]], jnp.float32))
    tree = build_tree(log_probs, jnp.array([[1, 2], [3, 0]], jnp.int32), PLAN.budget).with_root(4)
    return jax.tree.map(lambda x: jnp.stack([x] * count), tree)


def _state(slots: int) -> SpecState:
    cache = jnp.zeros((1, slots, 8, 4), jnp.float32)
    number = jnp.full(slots, 3, jnp.int32)
    settings = Sampling.empty(slots), Adjustments.empty(slots, 5)
    return SpecState(LatentCache(cache, cache), None, number, number, number, *settings)


def _logits(batch: int, nodes: int) -> jax.Array:
    """Logits whose choice is token 1 at every node."""
    return jnp.zeros((batch, nodes, 5), jnp.float32).at[..., 1].set(1.0)


def test_fitting_arrays_pass():
    accepted = accept(_trees(2), _logits(2, 4), _state(2), PLAN)
    assert accepted.tokens[:, :2].tolist() == [[1, 1]] * 2
    assert accepted.emitted_len.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("trees", "logits", "slots"),
    [(2, (2, 5), 2), (3, (2, 4), 2), (2, (2, 4), 3), (2, (3, 4), 2)],
    ids=["nodes", "trees", "slots", "logits"],
)
def test_accept_refuses_axes_that_disagree(trees, logits, slots):
    with pytest.raises(TypeCheckError):
        accept(_trees(trees), _logits(*logits), _state(slots), PLAN)


def test_a_field_of_a_record_is_named():
    tree = dataclasses.replace(_trees(2), depth=jnp.zeros((2, 5), jnp.int32))
    with pytest.raises(TypeCheckError) as caught:
        follow(tree, jnp.zeros((2, 4), jnp.int32), PLAN.depth)
    assert "Tree.depth is int32[2,5]" in str(caught.value.__cause__.__cause__)


def test_dtypes_are_checked():
    numbers = jnp.zeros((2, 3), jnp.float32)
    with pytest.raises(TypeCheckError, match="tokens"):
        cut_at_stop(numbers, jnp.ones(2, jnp.int32), jnp.ones((2, 1), jnp.int32))


def test_sizes_named_by_arguments_are_checked():
    """A router that returned another number of experts than asked for would be caught."""
    ids, weights = route(
        jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
        None,
        num_experts_per_tok=2,
        scoring_func="softmax",
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    assert ids.tolist() == [[2, 1], [2, 1]]
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "slots"),
    [((2, 1, 3, 5), 1), ((1, 1, 3, 4), 1), ((2, 1, 3, 4), 2)],
    ids=["width", "layers", "slots"],
)
def test_append_refuses_rows_of_another_shape(rows, slots):
    index = jnp.zeros(slots, jnp.int32)
    with pytest.raises((TypeCheckError, ValueError)):
        append((jnp.zeros((2, 2, 8, 4)),), (jnp.zeros(rows),), index, index, index)


def test_shapes_are_checked_while_tracing():
    index = jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jax.ShapeDtypeStruct((2, 2, 8, 4), jnp.float32)
    rows = jax.ShapeDtypeStruct((3, 1, 3, 4), jnp.float32)
    with pytest.raises(TypeCheckError):
        jax.eval_shape(append, (cache,), (rows,), index, index, index)
