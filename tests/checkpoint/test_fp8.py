"""FP8 block dequantization against an independent decoder of the eight bits."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from k26jax.checkpoint.fp8 import dequantize_fp8_blocks
from k26jax.errors import CheckpointError

E4M3 = ml_dtypes.float8_e4m3fn


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """float64 values by the definition: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    codes = codes.astype(np.int64)
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    value = sign * np.where(exponent == 0, mantissa * 2.0**-9, normal)
    return np.where(codes & 127 == 127, np.nan, value)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """The bits of finite float32 values rounded to BF16, ties to even, by integer arithmetic."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def random_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[codes & 127 == 127] = 0x38  # 1.0 in place of NaN
    return codes


def expected_bits(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    exact = decode_e4m3(codes)
    for i, j in np.ndindex(codes.shape):
        exact[i, j] *= float(scale[i // block[0], j // block[1]])
    return bf16_bits(exact)


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (1, 1), (130, 257), (127, 129), (300, 5)]
)
def test_published_block_size(shape):
    rng = np.random.default_rng(sum(shape))
    codes = random_codes(rng, shape)
    scale = rng.uniform(1e-4, 3e-2, [-(-size // 128) for size in shape]).astype(np.float32)
    found = dequantize_fp8_blocks(codes.view(E4M3), scale)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.view(np.uint16), expected_bits(codes, scale, (128, 128)))


@hypothesis.given(
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    block=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_block_size(shape, block, seed):
    rng = np.random.default_rng(seed)
    codes = random_codes(rng, shape)
    grid = [-(-size // edge) for size, edge in zip(shape, block, strict=True)]
    scale = np.exp2(rng.uniform(-20, 20, grid)).astype(np.float32)
    found = dequantize_fp8_blocks(codes.view(E4M3), scale, block)
    np.testing.assert_array_equal(found.view(np.uint16), expected_bits(codes, scale, block))


def test_every_code():
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    found = dequantize_fp8_blocks(codes.view(E4M3), np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(found.astype(np.float64), decode_e4m3(codes))
    assert np.isnan(found.astype(np.float32)).sum() == 2


def test_quantized_weight_comes_back_within_half_a_step():
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((200, 300)).astype(np.float32)
    scale = np.empty((2, 3), np.float32)
    codes = np.empty(weight.shape, E4M3)
    for i, j in np.ndindex(scale.shape):
        part = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        scale[i, j] = np.abs(weight[part]).max() / 448
        codes[part] = (weight[part] / scale[i, j]).astype(E4M3)
    found = dequantize_fp8_blocks(codes, scale).astype(np.float32)
    # Half a step of three mantissa bits, and the rounding to BF16 after it.
    bound = np.abs(weight) * (2**-4 + 2**-8) + scale.max() * 2**-9
    assert (np.abs(found - weight) <= bound).all()


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (np.zeros((130, 128), E4M3), np.ones((1, 1), np.float32), r"scales \(2, 1\).*\(1, 1\)"),
        (np.zeros((128, 130), E4M3), np.ones((2, 1), np.float32), r"scales \(1, 2\).*\(2, 1\)"),
        (np.zeros((128, 128), E4M3), np.ones((), np.float32), r"scales \(1, 1\)"),
        (np.zeros((128, 128), E4M3), np.ones((1, 1), np.float64), "float32 scales.*float64"),
        (np.zeros((1, 128, 128), E4M3), np.ones((1, 1), np.float32), "two axes"),
        (np.zeros((128, 128), np.uint8), np.ones((1, 1), np.float32), "float8_e4m3fn.*uint8"),
        (np.zeros((8, 8), ml_dtypes.float8_e5m2), np.ones((1, 1), np.float32), "float8_e5m2"),
    ],
)
def test_refuses_what_does_not_fit(weight, scale, message):
    with pytest.raises(CheckpointError, match=f"^model.w: .*{message}"):
        dequantize_fp8_blocks(weight, scale, name="model.w")
