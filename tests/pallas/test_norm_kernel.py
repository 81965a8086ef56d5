"""Norms, rotations and cache writes, interpreted, against float64 NumPy and the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k26jax.errors import KernelError
from k26jax.model import layers
from k26jax.pallas import norm as norms
from k26jax.pallas.norm import kernel, reference
from k26jax.pallas.norm.cases import APPEND_CASES, HEADS_CASES, ROW_CASES

PARTS = 3
LAYER, LAYERS, ROWS, EPS = 1, 3, 3, 1e-3
SMALL_ROWS = [pytest.param(case, id=case.name) for case in ROW_CASES if case.is_small]
SMALL_HEADS = [pytest.param(case, id=case.name) for case in HEADS_CASES if case.is_small]
SMALL_APPENDS = [pytest.param(case, id=case.name) for case in APPEND_CASES if case.is_small]


def normal(seed: int, *shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def gains_of(seed: int, width: int, dtype=np.float32) -> np.ndarray:
    """Gains of all layers; those of the others are NaN."""
    gains = np.full((LAYERS, width), np.nan)
    gains[LAYER] = 1 + 0.3 * normal(seed, width)
    return gains.astype(dtype)


def tables(half: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    angles = 4 * normal(3, rows, half)
    return np.float32(1.25) * np.cos(angles), np.float32(1.25) * np.sin(angles)


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def normalized(x, gain) -> np.ndarray:
    x, gain = wide(x), wide(gain)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * gain


def rotated(x: np.ndarray, cos, sin, *, interleaved: bool) -> np.ndarray:
    """The pairs as complex numbers."""
    half = x.shape[-1] // 2
    pairs = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (pairs[0] + 1j * pairs[1]) * (wide(cos) + 1j * wide(sin)).reshape(
        len(x), *(1,) * (x.ndim - 2), half
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


def near(actual, expected: np.ndarray) -> None:
    np.testing.assert_allclose(wide(actual), expected, rtol=2e-6, atol=3e-6)


@functools.cache
def program(name: str, form=kernel, **static):
    # XLA may otherwise leave out roundings between fused operations.
    options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    return jax.jit(functools.partial(getattr(form, name), **static), compiler_options=options)


def same(name: str, *arrays, layer=None, static=None, **more):
    """Returns the kernel's results; in bfloat16 they are the reference's."""
    static, layer_of = static or {}, {} if layer is None else {"layer": np.int32(layer)}
    first, rest = (
        jax.tree.map(lambda array: array.astype(jnp.bfloat16), part) for part in (arrays[:2], more)
    )
    both = [
        program(name, form, **static)(*first, *arrays[2:], **layer_of, **rest)
        for form in (kernel, reference)
    ]
    for actual, expected in zip(*map(jax.tree.leaves, both), strict=True):
        assert (actual.dtype, actual.shape) == (jnp.bfloat16, expected.shape)
        # The order of the sums may move a value across a rounding.
        np.testing.assert_allclose(wide(actual), wide(expected), rtol=2**-6, atol=2**-7)
        assert np.mean(wide(actual) == wide(expected)) > 0.98
    return program(name, **static)(*arrays, **layer_of, **more)


@pytest.mark.parametrize("case", SMALL_ROWS)
def test_rms_norm(case):
    x, gains = normal(1, ROWS, case.width), gains_of(2, case.width)
    residual = normal(3, ROWS, case.width)
    normed = same("rms_norm", x, gains, layer=LAYER, static={"eps": EPS})
    near(normed, normalized(x, gains[LAYER]))
    total, normed = same("rms_norm", x, gains, layer=LAYER, static={"eps": EPS}, residual=residual)
    np.testing.assert_array_equal(total, x + residual)
    near(normed, normalized(x + residual, gains[LAYER]))


def test_a_residual_of_another_type_is_rounded_before_the_sum():
    x = normal(1, ROWS, 40, dtype=jnp.bfloat16)
    residual = normal(2, ROWS, 40)
    gains = gains_of(2, 40, jnp.bfloat16)
    total, _ = program("rms_norm", eps=EPS)(x, gains, layer=np.int32(LAYER), residual=residual)
    np.testing.assert_array_equal(wide(total), wide(x + residual.astype(jnp.bfloat16)))


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("case", SMALL_HEADS)
def test_latent(case, interleaved):
    compressed = normal(1, PARTS, ROWS, case.latent + case.rope)
    gains, query_gains = gains_of(2, case.latent), gains_of(4, case.query_rank)
    query, (cos, sin) = normal(5, PARTS, ROWS, case.query_rank), tables(case.rope // 2)
    static = {"eps": EPS, "interleaved": interleaved}
    c_kv, k_pe, q_latent = same(
        "latent",
        compressed,
        gains,
        cos,
        sin,
        layer=LAYER,
        static=static,
        query=query,
        query_gains=query_gains,
    )
    compressed, query = compressed.sum(axis=0), query.sum(axis=0)
    near(c_kv, normalized(compressed[:, : case.latent], gains[LAYER]))
    turned = rotated(wide(compressed)[:, case.latent :], cos, sin, interleaved=interleaved)
    near(k_pe, turned)
    near(q_latent, normalized(query, query_gains[LAYER]))


def test_latent_without_a_query():
    case = HEADS_CASES[1]
    arrays = (normal(1, 1, ROWS, case.latent + case.rope), gains_of(2, case.latent))
    static = {"eps": EPS, "interleaved": True}
    rows = same("latent", *arrays, *tables(case.rope // 2), layer=LAYER, static=static)
    assert [row.shape for row in rows] == [(ROWS, case.latent), (ROWS, case.rope)]


@pytest.mark.parametrize("case", SMALL_HEADS)
def test_head_norm(case):
    x, gains = normal(1, ROWS, case.heads, 2 * case.rope), gains_of(2, 2 * case.rope)
    cos, sin = tables(case.rope)
    heads = same("head_norm", x, gains, cos, sin, layer=LAYER, static={"eps": EPS})
    near(heads, rotated(normalized(x, gains[LAYER]), cos, sin, interleaved=False))


def test_the_reference_rounds_where_the_model_does():
    """Bit for bit, in bfloat16."""
    x, gain = (jnp.asarray(normal(*shape), jnp.bfloat16) for shape in ((1, 5, 48), (2, 48)))
    normed = reference.rms_norm(x, gain[None], layer=0, eps=EPS)
    np.testing.assert_array_equal(wide(normed), wide(layers.rms_norm(x, gain, EPS)))
    cos, sin = tables(24, 5)
    for interleaved in (True, False):
        turned, expected = (
            form.rotate(x, cos, sin, interleaved=interleaved) for form in (reference, layers)
        )
        np.testing.assert_array_equal(wide(turned), wide(expected))


def test_a_row_never_depends_on_the_others():
    x, residual = (normal(seed, 9, 72, dtype=jnp.bfloat16) for seed in (1, 2))
    gains, chosen = gains_of(3, 72, jnp.bfloat16), np.array([8, 1])
    call = program("rms_norm", eps=EPS)
    whole, some = (
        call(x[rows], gains, layer=np.int32(LAYER), residual=residual[rows])
        for rows in (np.arange(9), chosen)
    )
    for all_rows, few in zip(whole, some, strict=True):
        assert np.array_equal(wide(all_rows)[chosen], wide(few))


@pytest.mark.parametrize("case", SMALL_APPENDS)
def test_append(case):
    """Rows past the count or the capacity may hold anything; nothing else is touched."""
    t = 5
    slots, start = np.array([2, 0]), np.array([1, case.capacity - 2])
    count = np.array([3, 5])
    shape = (case.layers, case.slots, case.capacity)
    caches = tuple(normal(1, *shape, *width) for width in case.widths)
    rows = tuple(normal(2, case.layers, 2, t, *width) for width in case.widths)
    for part in rows:
        part[:, 0, 3:] = part[:, 1, 2:] = np.nan
    indices = [part.astype(np.int32) for part in (slots, start, count)]
    written = program("append")(caches, rows, *indices)
    plain = program("append", reference)(caches, rows, *indices)
    for cache, new, actual, other in zip(caches, rows, written, plain, strict=True):
        expected = np.array(cache)
        for b in range(2):
            for row in range(count[b]):
                if start[b] + row < case.capacity:
                    expected[:, slots[b], start[b] + row] = new[:, b, row]
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(other, expected)


def test_append_rounds_to_the_type_of_the_cache():
    cache, rows = np.zeros((1, 1, 3, 4), jnp.bfloat16), normal(1, 1, 1, 1, 4)
    one = np.ones(1, np.int32)
    (written,) = program("append")((cache,), (rows,), 0 * one, one, one)
    expected = rows[0, 0, 0].astype(jnp.bfloat16)
    np.testing.assert_array_equal(wide(written)[0, 0, 1], wide(expected))


@pytest.mark.parametrize(
    ("operation", "operands"),
    [("rms_norm", 2), ("latent", 0), ("head_norm", 0), ("append", 0)],
)
def test_a_form_that_does_not_exist_is_refused(operation, operands):
    with pytest.raises(KernelError, match=f"{operation} has no 'cudnn'"):
        getattr(norms, operation)(*[None] * operands, kernels="cudnn")
