"""INT4 packing, dequantization and quantization, bit for bit."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from k26jax.checkpoint.int4 import (
    check_weight_shape,
    dequantize_int4,
    pack_int4,
    quantize_int4,
    unpack_int4,
)
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.errors import CheckpointError

BF16 = ml_dtypes.bfloat16
INT4_ARRAYS = hnp.arrays(
    np.int8,
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=40),
    elements=st.integers(-8, 7),
)


def golden_arrays(golden_dir: Path, name: str) -> list[dict[str, np.ndarray]]:
    """The arrays of every file of this name in the model folders."""
    files = sorted(golden_dir.glob(f"models/*/{name}"))
    assert files
    return [dict(np.load(file)) for file in files]


def packed_by_arithmetic(row: list[int]) -> list[int]:
    """Words of one row, as sums of powers of 16 over Python integers."""
    words = []
    for start in range(0, len(row), 8):
        word = sum((value + 8) * 16**i for i, value in enumerate(row[start : start + 8]))
        words.append(word - 2**32 if word >= 2**31 else word)
    return words


def round_to_bf16(value: Fraction) -> float:
    """The nearest BF16 of a number in the normal range, ties to even, by exact arithmetic."""
    if value == 0:
        return 0.0
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (exponent - 7)
    return float(round(value / step) * step)  # round() of a Fraction takes ties to even


def test_golden_pack_cases(golden_dir):
    for arrays in golden_arrays(golden_dir, "pack_cases.npz"):
        cases = [key.removesuffix(".packed") for key in arrays if key.endswith(".packed")]
        assert cases
        for case in cases:
            values, packed = arrays[f"{case}.int4"], arrays[f"{case}.packed"]
            found = pack_int4(values)
            assert found.dtype == np.int32
            np.testing.assert_array_equal(found, packed)
            back = unpack_int4(packed, values.shape[-1])
            assert back.dtype == np.int8
            np.testing.assert_array_equal(back, values)


def test_golden_quantize_cases(golden_dir):
    for arrays in golden_arrays(golden_dir, "pack_cases.npz"):
        cases = [key.removesuffix(".scale") for key in arrays if key.endswith(".scale")]
        assert cases
        for case in cases:
            weight = arrays[f"{case}.weight"]
            packed, scale = quantize_int4(
                weight, weight.shape[-1] // arrays[f"{case}.scale"].shape[-1]
            )
            assert scale.dtype == BF16
            np.testing.assert_array_equal(scale.astype(np.float32), arrays[f"{case}.scale"])
            np.testing.assert_array_equal(packed, arrays[f"{case}.packed"])
            for dtype, key in ((np.float32, "dequantized"), (BF16, "dequantized_bf16")):
                found = dequantize_int4(packed, scale, weight.shape, dtype)
                assert found.dtype == dtype
                np.testing.assert_array_equal(found.astype(np.float32), arrays[f"{case}.{key}"])


def test_golden_experts(golden_dir):
    """The files of the checkpoint decode to what compressed-tensors decodes them to."""
    files = sorted(golden_dir.glob("models/*/dequantized.npz"))
    assert files
    for file in files:
        arrays = dict(np.load(file))
        names = [key for key in arrays if key.endswith(".weight")]
        assert names
        with open_checkpoint(file.parent) as checkpoint:
            for name in names:
                packed, scale, shape = (
                    checkpoint.read(f"{name}_{part}") for part in ("packed", "scale", "shape")
                )
                expected = arrays[name]
                assert check_weight_shape(shape, packed.shape, scale.shape, name) == expected.shape
                values = unpack_int4(packed, expected.shape[-1])
                np.testing.assert_array_equal(values, arrays[name.removesuffix("weight") + "int4"])
                found = dequantize_int4(packed, scale, shape)
                assert found.dtype == np.float32
                np.testing.assert_array_equal(found, expected)
                rounded = dequantize_int4(packed, scale, shape, BF16)
                np.testing.assert_array_equal(rounded, expected.astype(BF16))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([-8, -7, -1, 0, 1, 2, 6, 7], [0xFEA98710]),
        (list(range(-8, 8)), [0x76543210, 0xFEDCBA98]),
        (list(range(7, -9, -1)), [0x89ABCDEF, 0x01234567]),
        ([-4, -4, -1, -2, 3, 2, -1, -8], [0x07AB6744]),
        ([-8], [0x0]),
        ([7, 0, -8], [0x08F]),
    ],
)
def test_rows_printed_in_the_specification(values, words):
    packed = np.array(words, np.uint32).view(np.int32)
    np.testing.assert_array_equal(pack_int4(np.array(values, np.int8)), packed)
    np.testing.assert_array_equal(unpack_int4(packed, len(values)), values)


def test_dequantized_row_printed_in_the_specification():
    packed = np.array([[0x07AB6744]], np.int32)
    scale = np.array([[0.28125]], BF16)
    weight = [-1.125, -1.125, -0.28125, -0.5625, 0.84375, 0.5625, -0.28125, -2.25]
    for dtype in (np.float32, BF16):
        found = dequantize_int4(packed, scale, (1, 8), dtype)
        assert found.astype(np.float64).tolist() == [weight]


@hypothesis.given(values=INT4_ARRAYS)
def test_pack_round_trip(values):
    packed = pack_int4(values)
    assert packed.shape == (*values.shape[:-1], -(-values.shape[-1] // 8))
    rows = values.reshape(-1, values.shape[-1]) if values.size else []
    expected = [packed_by_arithmetic(row) for row in np.asarray(rows).tolist()]
    assert packed.flatten().tolist() == [word for row in expected for word in row]
    back = unpack_int4(packed, values.shape[-1])
    np.testing.assert_array_equal(back, values)
    assert back.flags.c_contiguous


@hypothesis.given(values=INT4_ARRAYS)
def test_strided_arrays(values):
    turned = np.ascontiguousarray(values[..., ::-1])[..., ::-1]
    np.testing.assert_array_equal(pack_int4(turned), pack_int4(values))
    packed = np.repeat(pack_int4(values), 2, axis=-1)[..., ::2]
    np.testing.assert_array_equal(unpack_int4(packed, values.shape[-1]), values)


@hypothesis.given(
    weight=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.sampled_from([4, 8, 12])),
        elements=st.floats(-1000, 1000, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6),
    )
)
def test_quantize_follows_the_rule(weight):
    """Groups of four against exact rational arithmetic."""
    packed, scale = quantize_int4(weight, 4)
    assert scale.shape == (weight.shape[0], weight.shape[1] // 4)
    values = unpack_int4(packed, weight.shape[1])
    found = dequantize_int4(packed, scale, weight.shape, group_size=4)
    for i, j in np.ndindex(scale.shape):
        group = weight[i, 4 * j : 4 * j + 4]
        # The division by 7.5 is one in float32, as in compressed-tensors.
        exact = float(round_to_bf16(Fraction(float(np.abs(group).max() / np.float32(7.5)))))
        assert float(scale[i, j]) == exact
        for k, w in enumerate(group):
            quotient = np.float32(w) / np.float32(exact) if exact else np.float32(0)
            q = min(max(round(Fraction(float(quotient))), -8), 7)
            assert values[i, 4 * j + k] == q
            assert Fraction(float(found[i, 4 * j + k])) == q * Fraction(exact)


@hypothesis.given(
    values=hnp.arrays(np.int8, (3, 64), elements=st.integers(-8, 7)),
    scale=hnp.arrays(np.float32, (3, 2), elements=st.floats(2**-20, 2**20, width=32)),
)
def test_dequantize_is_exact_in_float32_and_rounds_once_to_bf16(values, scale):
    scale = scale.astype(BF16)
    found = dequantize_int4(pack_int4(values), scale, values.shape)
    rounded = dequantize_int4(pack_int4(values), scale, values.shape, BF16)
    for i, j in np.ndindex(values.shape):
        exact = int(values[i, j]) * Fraction(float(scale[i, j // 32]))
        assert Fraction(float(found[i, j])) == exact
        assert float(rounded[i, j]) == round_to_bf16(exact)


def test_zero_groups_stay_zero():
    weight = np.zeros((2, 96), np.float32)
    weight[0, :32] = np.linspace(-1, 1, 32, dtype=np.float32)
    weight[1, 32:64] = np.float32(1e-45)  # too small for any scale of BF16
    packed, scale = quantize_int4(weight)
    found = dequantize_int4(packed, scale, weight.shape)
    assert np.isfinite(scale.astype(np.float32)).all()
    assert np.abs(found[0, :32]).max() > 0.9
    assert not found[0, 32:].any()
    assert not found[1].any()
    assert not unpack_int4(packed, 96)[1].any()


def test_each_group_uses_its_own_scale():
    values = np.ones((2, 64), np.int8)
    scale = np.array([[1, 2], [3, 4]], BF16)
    found = dequantize_int4(pack_int4(values), scale, (2, 64))
    expected = np.block([[np.ones(32), np.full(32, 2)], [np.full(32, 3), np.full(32, 4)]])
    np.testing.assert_array_equal(found, expected)


def test_last_group_may_be_short():
    values = np.arange(-8, 5, dtype=np.int8)[None]
    scale = np.array([[1, 2, 4, 8]], BF16)
    found = dequantize_int4(pack_int4(values), scale, (1, 13), group_size=4)
    np.testing.assert_array_equal(found, values * np.repeat([1, 2, 4, 8], 4)[:13])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([8], np.int8), r"\[-8, 7\], found 8 to 8"),
        (np.array([0, -9], np.int8), r"\[-8, 7\], found -9 to 0"),
        (np.array([1], np.int32), "must be int8"),
        (np.array(1, np.int8), "at least one axis"),
    ],
)
def test_pack_refuses(values, message):
    with pytest.raises(CheckpointError, match=message):
        pack_int4(values)


@pytest.mark.parametrize(
    ("packed", "k"),
    [
        (np.zeros((2, 2), np.int32), 17),
        (np.zeros((2, 2), np.int32), 8),
        (np.zeros((2, 2), np.int64), 16),
        (np.int32(0), 0),
    ],
)
def test_unpack_refuses(packed, k):
    with pytest.raises(CheckpointError, match=r"must be int32 with .* words"):
        unpack_int4(packed, k)


@pytest.mark.parametrize(
    ("packed", "scale", "shape"),
    [
        ((2, 8), (2, 2), (3, 64)),
        ((2, 8), (2, 1), (2, 64)),
        ((2, 8), (1, 2), (2, 64)),
        ((2, 7), (2, 2), (2, 64)),
        ((2, 8), (2, 2), ()),
        ((8,), (2,), (1, 64)),
    ],
)
def test_dequantize_refuses_shapes_that_do_not_fit(packed, scale, shape):
    with pytest.raises(CheckpointError, match="INT4"):
        dequantize_int4(np.zeros(packed, np.int32), np.ones(scale, BF16), shape)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.zeros((2, 33), np.float32), "groups of 32"),
        (np.zeros((2, 32), BF16), "must be float32"),
        (np.full((2, 32), np.nan, np.float32), "NaN or infinity"),
        (np.full((2, 32), -np.inf, np.float32), "NaN or infinity"),
    ],
)
def test_quantize_refuses(weight, message):
    with pytest.raises(CheckpointError, match=message):
        quantize_int4(weight)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("shape", "packed", "scale"),
    [
        ((2048, 7168), (2048, 896), (2048, 224)),
        ((7168, 2048), (7168, 256), (7168, 64)),
        ((3, 13), (3, 2), (3, 1)),
        ((2, 3, 64), (2, 3, 8), (2, 3, 2)),
    ],
)
def test_weight_shape_that_fits(dtype, shape, packed, scale):
    assert check_weight_shape(np.array(shape, dtype), packed, scale, "w") == shape


@pytest.mark.parametrize(
    "weight_shape",
    [
        np.array([96, 65], np.int32),
        np.array([95, 64], np.int32),
        np.array([64, 96], np.int64),
        np.array([-96, 64], np.int32),
        np.array([96, 0], np.int32),
        np.array([96, 64, 1], np.int32),
        np.array([[96, 64]], np.int32),
        np.array([96.0, 64.0], np.float32),
        np.array(96, np.int32),
    ],
)
def test_weight_shape_that_does_not_fit(weight_shape):
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name}: weight_shape"):
        check_weight_shape(weight_shape, (96, 8), (96, 2), name)


@pytest.mark.parametrize(
    ("packed", "scale"), [((96, 8), (96, 1)), ((96, 9), (96, 2)), ((96,), (96, 2))]
)
def test_weight_shape_beside_wrong_parts(packed, scale):
    with pytest.raises(CheckpointError, match="w: weight_shape"):
        check_weight_shape(np.array([96, 64], np.int32), packed, scale, "w")
