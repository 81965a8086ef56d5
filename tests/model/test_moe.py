"""The mixture-of-experts block and the SwiGLU block against their formulas in NumPy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.pairs import tiny_configs
from fixtures.quick import quick_jit
from flax import nnx

from k26jax.config import Quantization
from k26jax.errors import KernelError
from k26jax.model.moe import MoE
from k26jax.pallas.int4_moe.reference import FEW_ROWS

BASE = replace(tiny_configs()[0], num_hidden_layers=4, first_k_dense_replace=1)
VARIANTS = {
    "int4": BASE,
    "float": replace(BASE, quantization=Quantization.NONE, moe_intermediate_size=20),
    "groups, two shared experts": replace(
        BASE, n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=2
    ),
    "softmax without bias, no shared expert": replace(
        BASE,
        n_shared_experts=0,
        scoring_func="softmax",
        topk_method="greedy",
        norm_topk_prob=False,
    ),
}


def swiglu(x, gate, up, down) -> np.ndarray:
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def matrices(projection, row: int) -> np.ndarray:
    """The float64 matrices [e, o, i] of one layer, INT4 words decoded nibble by nibble."""
    if hasattr(projection, "weight"):
        return np.asarray(projection.weight[...])[row].astype(np.float64)
    words = np.asarray(projection.weight_packed[...])[row].astype(np.int64) & 0xFFFFFFFF
    scale = np.asarray(projection.weight_scale[...])[row].astype(np.float64)
    values = np.stack([(words >> 4 * j & 15) - 8 for j in range(8)], axis=-1)
    return values.reshape(*words.shape[:-1], -1) * np.repeat(scale, 32, axis=-1)


def oracle(moe: MoE, row: int, x: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Every token alone: routed experts with the weights of the module's own router, and shared."""
    x = x.astype(np.float64)
    ids, weights = map(np.asarray, moe.routing(row, jnp.asarray(x, jnp.float32), "reference"))
    gate, up, down = (matrices(p, row) for p in (moe.gate_proj, moe.up_proj, moe.down_proj))
    out = np.zeros(x.shape)
    for t in np.flatnonzero(valid):
        for e, weight in zip(ids[t], weights[t], strict=True):
            out[t] += weight * swiglu(x[t], gate[e], up[e], down[e])
    if moe.config.n_shared_experts:
        names = ("gate_proj", "up_proj", "down_proj")
        shared = [np.asarray(getattr(moe.shared_experts, name)[row], np.float64) for name in names]
        out += swiglu(x, *shared)
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_block(variant):
    """Every MoE layer's row of the stack, invalid rows between valid ones."""
    config = VARIANTS[variant]
    moe = MoE(config, dtype=jnp.float32, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(4)
    if config.has_selection_bias:
        moe.e_score_correction_bias[...] = jnp.asarray(
            rng.standard_normal(moe.e_score_correction_bias.shape), jnp.float32
        )
    x = rng.standard_normal((9, config.hidden_size)).astype(np.float32)
    valid = np.arange(9) % 3 != 1
    assert len(config.moe_layer_ids) == 3

    @quick_jit
    def all_layers(x, valid):
        sparse = [moe(row, x, valid, "auto") for row in range(3)]
        return sparse, [moe(row, x, valid, "auto", differentiable=True) for row in range(3)]

    for form in all_layers(x, valid):
        for row, found in enumerate(form):
            expected = oracle(moe, row, x, valid)
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=5e-5)


def test_few_and_many_rows_agree():
    """A token's output is the same beside few rows (by expert) and many rows (grouped)."""
    moe = MoE(BASE, dtype=jnp.float32, rngs=nnx.Rngs(5))
    n = 2 * FEW_ROWS + 7
    x = jax.random.normal(jax.random.key(0), (n, BASE.hidden_size))
    program = quick_jit(lambda x: moe(1, x, jnp.ones(len(x), bool), "auto"))
    many = program(x)
    for start in (0, FEW_ROWS, n - 5):
        few = program(x[start : start + 5])
        np.testing.assert_allclose(many[start : start + 5], few, rtol=2e-5, atol=5e-5)


def test_router_is_float32_whatever_the_weights_are():
    """Logits of bfloat16 weights and rows are exact products summed in float32."""
    moe = MoE(BASE, dtype=jnp.bfloat16, rngs=nnx.Rngs(6))
    assert moe.gate.dtype == jnp.bfloat16
    assert moe.e_score_correction_bias.dtype == jnp.float32
    x = jax.random.normal(jax.random.key(1), (40, BASE.hidden_size), jnp.bfloat16)
    ids, weights = moe.routing(0, x, "reference")
    gate = np.asarray(moe.gate[0], np.float64)
    scores = 1 / (1 + np.exp(-(np.asarray(x, np.float64) @ gate.T)))
    choice = scores + np.asarray(moe.e_score_correction_bias[0])
    order = np.argsort(-choice, axis=-1)[:, : BASE.num_experts_per_tok]
    np.testing.assert_array_equal(ids, order)
    picked = np.take_along_axis(scores, order, axis=-1)
    expected = picked / picked.sum(axis=-1, keepdims=True) * BASE.routed_scaling_factor
    np.testing.assert_allclose(weights, expected, rtol=2e-6)


def test_named_kernel_never_falls_back():
    moe = MoE(BASE, dtype=jnp.float32, rngs=nnx.Rngs(7))
    with pytest.raises(KernelError, match="'triton'"):
        moe(0, jnp.zeros((2, BASE.hidden_size)), jnp.ones(2, bool), "triton")
