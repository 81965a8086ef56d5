"""The router against one token at a time in NumPy: scores, groups, ties, weights."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from fixtures.quick import quick_jit

from k26jax.errors import KernelError
from k26jax.pallas.router import route

BASE = {
    "num_experts_per_tok": 3,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
}
N_EXPERTS = 12


def oracle(logits, bias, options) -> tuple[list[int], np.ndarray]:
    """Chosen experts of one token, best first, and their weights, in float64."""
    logits = logits.astype(np.float64)
    if options["scoring_func"] == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    choice = scores if bias is None else scores + bias.astype(np.float64)
    allowed = range(len(scores))
    if options["topk_method"] != "greedy" and options["n_group"] > 1:
        size = len(scores) // options["n_group"]
        best = {}
        for group in range(options["n_group"]):
            members = sorted(choice[group * size : (group + 1) * size], reverse=True)
            best[group] = members[0] if bias is None else sum(members[:2])
        kept = sorted(best, key=lambda group: (-best[group], group))[: options["topk_group"]]
        allowed = [expert for expert in allowed if expert // size in kept]
    chosen = sorted(allowed, key=lambda expert: (-choice[expert], expert))
    chosen = chosen[: options["num_experts_per_tok"]]
    weights = scores[chosen]
    if options["norm_topk_prob"]:
        weights = weights / (weights.sum() + 1e-20)
    return chosen, weights * options["routed_scaling_factor"]


@functools.cache
def program(**options):
    return quick_jit(functools.partial(route, **options))


def check(logits, bias, **changes) -> np.ndarray:
    options = {**BASE, **changes}
    ids, weights = jax.device_get(program(**options)(logits, bias))
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
    for row in range(len(logits)):
        expected_ids, expected_weights = oracle(logits[row], bias, options)
        assert ids[row].tolist() == expected_ids, row
        np.testing.assert_allclose(weights[row], expected_weights, rtol=3e-6, atol=1e-30)
    return ids


def random_logits(seed: int, rows: int = 40, n: int = N_EXPERTS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        (2 * rng.standard_normal((rows, n))).astype(np.float32),
        (0.3 * rng.standard_normal(n)).astype(np.float32),
    )


@pytest.mark.parametrize(
    ("topk_method", "n_group", "topk_group", "scoring_func", "norm_topk_prob"),
    [
        ("noaux_tc", 1, 1, "sigmoid", True),
        ("noaux_tc", 1, 1, "softmax", False),
        ("noaux_tc", 4, 2, "sigmoid", True),
        ("noaux_tc", 4, 2, "softmax", False),
        ("noaux_tc", 4, 1, "sigmoid", False),
        ("noaux_tc", 4, 4, "sigmoid", True),
        ("noaux_tc", 12, 3, "sigmoid", True),
        ("greedy", 1, 1, "softmax", False),
        ("greedy", 4, 2, "softmax", True),
        ("group_limited_greedy", 4, 2, "softmax", False),
        ("group_limited_greedy", 3, 1, "sigmoid", True),
    ],
)
def test_random(topk_method, n_group, topk_group, scoring_func, norm_topk_prob):
    logits, bias = random_logits(3)
    check(
        logits,
        bias if topk_method == "noaux_tc" else None,
        scoring_func=scoring_func,
        norm_topk_prob=norm_topk_prob,
        topk_method=topk_method,
        n_group=n_group,
        topk_group=topk_group,
    )


def test_kimi_size():
    logits, bias = random_logits(4, rows=8, n=384)
    check(logits, bias, num_experts_per_tok=8)


def test_bias_chooses_but_does_not_weigh():
    logits = np.zeros((1, N_EXPERTS), np.float32)
    logits[0, 5] = 9
    bias = np.zeros(N_EXPERTS, np.float32)
    bias[[2, 7, 11]] = [5, 7, 6]
    assert check(logits, bias).tolist() == [[7, 11, 2]]


def test_groups_of_negative_scores_beat_masked_ones():
    """Allowed experts may score below zero; experts of other groups are still out of reach."""
    logits, _ = random_logits(5)
    bias = np.full(N_EXPERTS, -3, np.float32)
    ids = check(logits, bias, n_group=4, topk_group=1)
    assert (ids // 3 == ids[:, :1] // 3).all()


@hypothesis.given(
    grid=st.lists(st.lists(st.integers(-1, 1), min_size=12, max_size=12), min_size=6, max_size=6),
    method=st.sampled_from(
        [("noaux_tc", 1, 1), ("noaux_tc", 4, 2), ("group_limited_greedy", 4, 2)]
    ),
)
def test_ties_go_to_the_lowest_id(grid, method):
    """Few distinct logits; scores are multiplied by powers of two only, so ties stay exact."""
    topk_method, n_group, topk_group = method
    logits = np.array(grid, np.float32)
    bias = np.zeros(N_EXPERTS, np.float32) if topk_method == "noaux_tc" else None
    check(logits, bias, topk_method=topk_method, n_group=n_group, topk_group=topk_group)


def test_all_equal():
    ids = check(np.zeros((2, N_EXPERTS), np.float32), np.zeros(N_EXPERTS, np.float32))
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_extreme_logits():
    """Weights of vanishing scores stay finite: the divisor is never zero."""
    logits = np.array([[-200.0] * N_EXPERTS, [200.0] * N_EXPERTS], np.float32)
    options = {**BASE, "num_experts_per_tok": 2}
    ids, weights = jax.device_get(program(**options)(logits, np.zeros(N_EXPERTS, np.float32)))
    assert ids.tolist() == [[0, 1], [0, 1]]
    np.testing.assert_allclose(weights[1], 2.827 / 2, rtol=1e-6)
    assert np.isfinite(weights).all()


def test_named_choice():
    logits, bias = random_logits(6)
    found = program(**BASE, kernels="reference")(logits, bias)
    jax.tree.map(np.testing.assert_array_equal, found, program(**BASE)(logits, bias))
    with pytest.raises(KernelError, match=r"router.*'triton'"):
        program(**BASE, kernels="triton")(logits, bias)
