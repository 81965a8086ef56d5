"""Products with float weights, interpreted, against float64 NumPy and the plain reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quick import quick_jit

from k26jax.errors import KernelError
from k26jax.pallas import dense as products
from k26jax.pallas.dense import kernel, reference
from k26jax.pallas.dense.cases import CASES, HEADS_CASES
from k26jax.pallas.gpu import Tile

LAYER, LAYERS = 1, 3
BY_NAME = {case.name: case for case in CASES}
SMALL = [pytest.param(case, id=case.name) for case in CASES if case.is_small]
SMALL_HEADS = [pytest.param(case, id=case.name) for case in HEADS_CASES if case.is_small]
TOLERANCE = {np.float32: 2e-6, jnp.bfloat16: 2**-8}


def normal(seed: int, *shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def stack(seed: int, *shape: int, dtype=np.float32) -> np.ndarray:
    """Weights of all layers; those of the others are NaN."""
    weights = np.full((LAYERS, *shape), np.nan)
    weights[LAYER] = normal(seed, *shape)
    return weights.astype(dtype)


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def near(actual, expected: np.ndarray, size: np.ndarray | float, dtype) -> None:
    """Errors are bounded by the size of what was summed, and by the last rounding."""
    error = np.abs(wide(actual) - expected)
    assert np.all(error <= TOLERANCE[dtype] * np.abs(expected) + 2e-6 * size)


def tables_of(rows: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of arbitrary angles, one row each."""
    angles = 3 * normal(11, rows, half)
    return np.cos(angles), np.sin(angles)


def rounded(x: np.ndarray, dtype) -> np.ndarray:
    return wide(x.astype(np.float32).astype(dtype))


@functools.cache
def program(name: str, form=kernel, **static):
    return quick_jit(functools.partial(getattr(form, name), **static))


def run(case, x, weights, **static):
    if not case.is_gated:
        name = "partial_sums" if case.is_parts else "dense"
        return program(name, **static)(x, tuple(weights), layer=np.int32(LAYER))
    gate, up, *others = weights
    return program("gated", **static)(x, gate, up, layer=np.int32(LAYER), others=tuple(others))


def weights_of(case, dtype=np.float32):
    widths = (case.widths[0], *case.widths) if case.is_gated else case.widths
    return [stack(seed, width, case.k, dtype=dtype) for seed, width in enumerate(widths)]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL)
def test_products_equal_float64(case, dtype):
    rows = {"one_block": 16, "odd": 1}.get(case.name, 19)
    x, weights = normal(7, rows, case.k, dtype=dtype), weights_of(case, dtype)
    outputs = run(case, x, weights)
    sums = [wide(x) @ wide(weight[LAYER]).T for weight in weights]
    sizes = [np.abs(wide(x)) @ np.abs(wide(weight[LAYER])).T for weight in weights]
    if case.is_gated:
        gate, up = (rounded(part, dtype) for part in sums[:2])
        inner = gate / (1 + np.exp(-gate)) * up
        assert outputs[0].dtype == dtype
        # A product that falls to the other side of a rounding moves the result by a rounding.
        slack = 3 * TOLERANCE[dtype] * (1 + np.abs(gate)) * (1 + np.abs(up))
        assert np.all(np.abs(wide(outputs[0]) - inner) <= slack + 2e-6 * sizes[0])
        outputs, sums, sizes = outputs[1:], sums[2:], sizes[2:]
    if case.is_parts:
        assert all(output.shape[0] > 1 and output.dtype == np.float32 for output in outputs)
        outputs, dtype = [output.sum(axis=0) for output in outputs], np.float32
    for output, expected, size in zip(outputs, sums, sizes, strict=True):
        assert (output.dtype, output.shape) == (dtype, expected.shape)
        near(output, expected, size, dtype)


@pytest.mark.parametrize("name", ["tails", "gated_beside"])
def test_products_equal_the_reference(name):
    case = BY_NAME[name]
    x, weights = normal(8, 19, case.k), weights_of(case)
    for one, other in zip(
        run(case, x, weights), run(case, x, weights, form=reference), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def test_each_result_has_its_own_dtype():
    x = normal(1, 3, 96, dtype=jnp.bfloat16)
    weights = (stack(2, 20, 96, dtype=jnp.bfloat16), stack(3, 12, 96, dtype=jnp.bfloat16))
    for form in (kernel, reference):
        call = program("dense", form, dtypes=(None, np.float32))
        kept, full = call(x, weights, layer=np.int32(LAYER))
        assert (kept.dtype, full.dtype) == (jnp.bfloat16, np.float32)
        near(full, wide(x) @ wide(weights[1][LAYER]).T, 96, np.float32)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL_HEADS)
def test_heads_equal_float64(case, dtype):
    kv_b = stack(4, case.heads, case.nope + case.value, case.latent, dtype=dtype)
    query = normal(5, 17, case.heads, case.nope + case.rope, dtype=dtype)
    attended = normal(6, 17, case.heads, case.latent)
    w_uk, w_uv = kv_b.copy(), kv_b.copy()
    w_uk[:, :, case.nope :] = w_uv[:, :, : case.nope] = np.nan
    layer = np.int32(LAYER)

    tables = tables_of(17, case.rope // 2)
    latent, _ = program("absorb", nope=case.nope, interleaved=True)(
        query, w_uk, *tables, layer=layer
    )
    left, right = wide(query)[..., : case.nope], wide(kv_b[LAYER])[:, : case.nope]
    assert (latent.dtype, latent.shape) == (dtype, (17, case.heads, case.latent))
    size = np.einsum("thn,hnc->thc", np.abs(left), np.abs(right))
    near(latent, np.einsum("thn,hnc->thc", left, right), size, dtype)

    values = program("values", nope=case.nope)(attended, w_uv, layer=layer)
    left, right = wide(attended.astype(dtype)), wide(kv_b[LAYER])[:, case.nope :]
    assert (values.dtype, values.shape) == (dtype, (17, case.heads, case.value))
    size = np.einsum("thc,hvc->thv", np.abs(left), np.abs(right))
    near(values, np.einsum("thc,hvc->thv", left, right), size, dtype)


def heads_program(name, form, case, **static):
    """`absorb` or `values` of rows; the positions' tables are the same for both forms."""
    if name == "values":
        return program(name, form, nope=case.nope)

    def call(x, kv_b, *, layer):
        cos, sin = (table[: len(x)] for table in tables_of(64, case.rope // 2))
        made = program(name, form, nope=case.nope, **static)
        return made(x, kv_b, cos, sin, layer=layer)

    return call


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("case", SMALL_HEADS)
def test_heads_equal_the_reference(case, interleaved):
    kv_b = normal(4, LAYERS, case.heads, case.nope + case.value, case.latent)
    for name, width in (("absorb", case.nope + case.rope), ("values", case.latent)):
        x = normal(5, 17, case.heads, width)
        actual, expected = (
            heads_program(name, form, case, interleaved=interleaved)(x, kv_b, layer=np.int32(2))
            for form in (kernel, reference)
        )
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_q_pe_is_rotated_in_float64(interleaved):
    case = HEADS_CASES[1]
    query = normal(5, 17, case.heads, case.nope + case.rope)
    query[..., : case.nope] = np.nan
    kv_b = normal(4, LAYERS, case.heads, case.nope + case.value, case.latent)
    absorb = heads_program("absorb", kernel, case, interleaved=interleaved)
    q_pe = absorb(query, kv_b, layer=np.int32(0))[1]
    x, half = wide(query)[..., case.nope :], case.rope // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = (wide(table)[:17, None] for table in tables_of(64, half))
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    np.testing.assert_allclose(q_pe, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("tails", 1), ("tails", 17), ("tails", 33), ("gated_beside", 17), ("parts", 17)],
)
def test_a_row_never_depends_on_the_others(name, rows):
    """Bit for bit, wherever the row stands and whatever the others hold."""
    case = BY_NAME[name]
    x, weights = normal(9, 40, case.k, dtype=jnp.bfloat16), weights_of(case, jnp.bfloat16)
    whole = run(case, x, weights)
    chosen = np.random.default_rng(rows).permutation(40)[:rows]
    some = run(case, x[chosen], weights)
    poisoned = x[chosen]
    poisoned[1:] = np.nan
    alone = run(case, poisoned, weights)
    for all_rows, few, first in zip(whole, some, alone, strict=True):
        assert np.array_equal(wide(all_rows)[..., chosen, :], wide(few))
        assert np.array_equal(wide(few)[..., :1, :], wide(first)[..., :1, :])


def test_head_rows_never_depend_on_the_others():
    case = HEADS_CASES[1]
    kv_b = normal(4, LAYERS, case.heads, case.nope + case.value, case.latent, dtype=jnp.bfloat16)
    chosen = np.array([30, 2, 17])
    for name, width in (("absorb", case.nope + case.rope), ("values", case.latent)):
        x = normal(5, 35, case.heads, width, dtype=jnp.bfloat16)
        call = heads_program(name, kernel, case, interleaved=True)
        whole, some = (call(part, kv_b, layer=np.int32(0)) for part in (x, x[chosen]))
        if name == "absorb":
            whole, some = whole[0], some[0]
        assert np.array_equal(wide(whole)[chosen], wide(some))


@pytest.mark.parametrize(
    "tile",
    [Tile(columns=16, depth=16, splits=3), Tile(columns=64, depth=512, splits=2)],
    ids=["shallow", "deep"],
)
def test_every_tile_gives_the_product(tile):
    case = BY_NAME["tails"]
    x, weights = normal(3, 18, case.k), weights_of(case)
    for output, weight in zip(run(case, x, weights, tile=tile), weights, strict=True):
        expected = wide(x) @ wide(weight[LAYER]).T
        near(output, expected, np.abs(wide(x)) @ np.abs(wide(weight[LAYER])).T, np.float32)


# Columns and lengths of sums.
SHAPES = (1536, 1536), (4608, 7168), (7168, 1024), (20480, 7168)


def test_the_tile_follows_from_the_weights():
    tiles = [kernel.dense_tile(n, k) for n, k in SHAPES]
    assert len(set(tiles)) == 4
    # 66 and 28 tiles of columns: about 256 programs.
    assert [kernel.parts_tile(n, 7168).parts for n in (2112, 896)] == [4, 9]
    assert {tile.rows for tile in tiles} == {16}


@pytest.mark.parametrize("operation", ["dense", "partial_sums", "gated", "absorb", "values"])
def test_a_form_that_does_not_exist_is_refused(operation):
    with pytest.raises(KernelError, match=f"{operation} has no 'cublas'"):
        getattr(products, operation)(kernels="cublas")
