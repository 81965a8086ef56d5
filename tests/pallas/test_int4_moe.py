"""Routed experts: every form against one expert and one token at a time in NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures.quick import quick_jit

from k26jax.checkpoint.int4 import dequantize_int4, pack_int4
from k26jax.errors import KernelError
from k26jax.pallas.int4_moe import ExpertWeights, experts, reference
from k26jax.pallas.int4_moe.reference import decode_int4

FORMS = {
    "dense": reference.dense,
    "by_expert": reference.by_expert,
    "grouped": reference.grouped,
    "experts": reference.experts,
}
LAYER, N_LAYERS = 1, 3


class Problem:
    """Random inputs, with ids beyond both ends of the experts, and the expected sum."""

    def __init__(self, rows: int, hidden: int, inner: int, n_experts: int, top_k: int, kind: str):
        rng = np.random.default_rng([rows, hidden, inner, n_experts, top_k])
        self.x = rng.standard_normal((rows, hidden)).astype(np.float32)
        self.ids = rng.integers(-2, n_experts + 2, (rows, top_k)).astype(np.int32)
        self.weights = rng.uniform(0.1, 2, (rows, top_k)).astype(np.float32)
        shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
        made = [_projection(rng, n_experts, shape, kind) for shape in shapes]
        self.stacks = [stack for stack, _ in made]
        self.matrices = [matrices for _, matrices in made]

    def expert(self, row: int, expert: int) -> np.ndarray:
        """One expert's answer to one row, in float64."""
        gate, up, down = (matrix[expert].astype(np.float64) for matrix in self.matrices)
        x = np.asarray(self.x[row], np.float64)
        swish = gate @ x / (1 + np.exp(-(gate @ x)))
        return down @ (swish * (up @ x))

    def expected(self) -> np.ndarray:
        out = np.zeros(self.x.shape)
        for row, choice in np.ndindex(self.ids.shape):
            expert = self.ids[row, choice]
            if 0 <= expert < len(self.matrices[0]):
                out[row] += self.weights[row, choice] * self.expert(row, expert)
        return out

    def run(self, form, dtype=jnp.float32, **kwargs) -> np.ndarray:
        x = jnp.asarray(self.x, dtype)
        return np.asarray(_program(form, **kwargs)(x, self.ids, self.weights, *self.stacks))


@functools.cache
def _program(form, **kwargs):
    return quick_jit(functools.partial(form, layer=LAYER, **kwargs))


def _projection(rng, n_experts, shape, kind) -> tuple[ExpertWeights, np.ndarray]:
    """A stack of layers of which only LAYER is usable, and that layer's matrices."""
    if kind == "float":
        matrices = rng.standard_normal((n_experts, *shape)).astype(np.float32) / shape[1] ** 0.5
        stack = np.full((N_LAYERS, *matrices.shape), np.nan, np.float32)
        stack[LAYER] = matrices
        return ExpertWeights(jnp.asarray(stack)), matrices
    values = rng.integers(-8, 8, (n_experts, *shape)).astype(np.int8)
    scales = rng.uniform(0.5, 1.5, (n_experts, shape[0], shape[1] // 32)) / shape[1] ** 0.5 / 4.6
    scales = scales.astype(ml_dtypes.bfloat16)
    words, all_scales = np.stack([pack_int4(values)] * N_LAYERS), np.stack([scales] * N_LAYERS)
    all_scales[[layer for layer in range(N_LAYERS) if layer != LAYER]] = np.nan
    matrices = values * np.repeat(scales.astype(np.float32), 32, axis=-1)
    return ExpertWeights(jnp.asarray(words), jnp.asarray(all_scales)), matrices


SHAPES = [
    # rows, hidden, inner, experts, chosen
    ((1, 32, 32, 1, 1), "float"),
    ((1, 64, 32, 10, 3), "int4"),
    ((3, 32, 96, 5, 2), "int4"),
    ((17, 64, 64, 40, 8), "int4"),
    ((64, 24, 40, 6, 2), "float"),
    ((65, 32, 64, 6, 2), "int4"),
    ((200, 24, 40, 3, 2), "float"),
    ((150, 64, 32, 33, 4), "float"),
]


@pytest.mark.parametrize(("shape", "kind"), SHAPES)
def test_forms_agree_with_the_oracle(shape, kind):
    problem = Problem(*shape, kind)
    expected = problem.expected()
    for name, form in FORMS.items():
        found = problem.run(form)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ids", [-1, 6, 2**31 - 1, -(2**31)])
def test_rows_without_any_expert_get_zeros(form, ids):
    problem = Problem(70, 32, 32, 6, 2, "float")
    problem.ids[::2] = ids
    found = problem.run(FORMS[form])
    assert (found[::2] == 0).all()
    np.testing.assert_allclose(found[1::2], problem.expected()[1::2], rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("form", FORMS)
def test_all_rows_on_one_expert(form):
    problem = Problem(130, 32, 32, 6, 1, "int4")
    problem.ids[:] = 4
    np.testing.assert_allclose(problem.run(FORMS[form]), problem.expected(), rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_nan_stays_alone(form, rows):
    """Idle rows may hold anything: first, middle and last are NaN and choose no expert."""
    problem = Problem(rows, 32, 32, 6, 2, "float")
    bad = [0, rows // 2, rows - 1] if rows > 3 else [0, rows - 1]
    problem.ids[bad] = 6
    clean = problem.run(FORMS[form])
    problem.x[bad] = np.nan
    good = [row for row in range(rows) if row not in bad]
    np.testing.assert_array_equal(problem.run(FORMS[form])[good], clean[good])


def test_bfloat16_rows():
    """Products are accumulated in float32; only operands are rounded."""
    problem = Problem(9, 64, 64, 6, 3, "int4")
    problem.x = problem.x.astype(ml_dtypes.bfloat16).astype(np.float32)
    scale = np.abs(problem.expected()).max()
    for form in FORMS.values():
        found = problem.run(form, jnp.bfloat16)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, problem.expected(), rtol=0, atol=0.02 * scale)


def test_api_choices():
    problem = Problem(5, 32, 32, 6, 2, "int4")
    expected = problem.expected()
    for options in ({}, {"kernels": "auto"}, {"kernels": "reference"}, {"differentiable": True}):
        np.testing.assert_allclose(problem.run(experts, **options), expected, rtol=2e-5, atol=5e-5)
    with pytest.raises(KernelError, match=r"int4_moe.*'cuda'"):
        problem.run(experts, kernels="cuda")


def test_gradient_of_the_dense_form():
    """The sum is linear in the weights: its gradient is each chosen expert's answer."""
    problem = Problem(4, 32, 32, 6, 2, "float")
    problem.ids = np.array([[0, 5], [2, 1], [3, 6], [-1, 4]], np.int32)
    direction = np.random.default_rng(1).standard_normal(problem.x.shape).astype(np.float32)

    def projected(weights):
        out = experts(
            problem.x, problem.ids, weights, *problem.stacks, layer=LAYER, differentiable=True
        )
        return (out * direction).sum()

    # The array types of the signature are those of traced values.
    problem.x, problem.ids = jnp.asarray(problem.x), jnp.asarray(problem.ids)
    found = jax.grad(projected)(jnp.asarray(problem.weights))
    for row, choice in itertools.product(range(4), range(2)):
        expert = int(problem.ids[row, choice])
        known = 0 <= expert < 6
        expected = direction[row] @ problem.expert(row, expert) if known else 0.0
        assert float(found[row, choice]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decode_int4_equals_the_checkpoint_decoder(dtype):
    rng = np.random.default_rng(5)
    words = rng.integers(-(2**31), 2**31, (3, 5, 24), np.int64).astype(np.int32)
    scales = rng.uniform(-2, 2, (3, 5, 6)).astype(ml_dtypes.bfloat16)
    found = np.asarray(decode_int4(jnp.asarray(words), jnp.asarray(scales), 192, dtype))
    expected = dequantize_int4(words, scales, (3, 5, 192), np.float32).astype(dtype)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_decode_int4_of_one_word():
    word = jnp.array([[0x07AB6744, 0, 0, -1]], jnp.int32)
    scale = jnp.array([[0.28125]], jnp.bfloat16)
    found = np.asarray(decode_int4(word, scale, 32, jnp.float32))[0]
    np.testing.assert_array_equal(found[:8] / 0.28125, [-4, -4, -1, -2, 3, 2, -1, -8])
    np.testing.assert_array_equal(found[8:24], -2.25)
    np.testing.assert_array_equal(found[24:], 7 * 0.28125)
