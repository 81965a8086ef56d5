"""Packs, unpacks and dequantizes INT4 weights as compressed-tensors' `pack-quantized` stores them.

A word of 32 bits holds eight neighbours along the input axis, the first in the lowest nibble, each
as value + 8. A scale belongs to `group_size` neighbours: weight = value * scale. NumPy only; the
functions must not know which tensors of a model are quantized.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt

from k26jax.errors import CheckpointError

VALUES_PER_WORD = 8
GROUP_SIZE = 32


def pack_int4(values: np.ndarray) -> np.ndarray:
    """Returns int8 values in [-8, 7], shape [..., k], as int32 words, shape [..., ceil(k / 8)].

    Returns: unused high nibbles of the last word are 0.
    Raises: CheckpointError for another dtype or a value out of range.
    """
    if values.dtype != np.int8 or values.ndim < 1:
        raise CheckpointError(
            f"INT4 values must be int8 with at least one axis, found {values.dtype} "
            f"{values.shape}; round and convert them first"
        )
    if values.size and (values.min() < -8 or values.max() > 7):
        raise CheckpointError(
            f"INT4 values must lie in [-8, 7], found {values.min()} to {values.max()}; clamp them"
        )
    k = values.shape[-1]
    words = -(-k // VALUES_PER_WORD)
    nibbles = np.zeros((*values.shape[:-1], words * VALUES_PER_WORD), np.uint8)
    nibbles[..., :k] = values + np.int8(8)
    packed = nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4)
    return packed.view("<i4").astype(np.int32, copy=False)


def unpack_int4(packed: np.ndarray, k: int) -> np.ndarray:
    """Returns the first k values of each row of words as int8, shape [..., k].

    Raises: CheckpointError if `packed` is not int32 [..., ceil(k / 8)].
    """
    words = -(-k // VALUES_PER_WORD)
    if packed.dtype != np.int32 or packed.shape[-1:] != (words,):
        raise CheckpointError(
            f"packed INT4 must be int32 with {words} words for {k} values on the last axis, found "
            f"{packed.dtype} {packed.shape}; check weight_shape"
        )
    pairs = np.ascontiguousarray(packed.astype("<i4", copy=False)).view(np.uint8)
    values = np.empty((*packed.shape[:-1], words * VALUES_PER_WORD), np.int8)
    values[..., 0::2] = pairs & 15
    values[..., 1::2] = pairs >> 4
    values -= 8
    return np.ascontiguousarray(values[..., :k])


def dequantize_int4(
    packed: np.ndarray,
    scale: np.ndarray,
    shape: Sequence[int] | np.ndarray,
    dtype: npt.DTypeLike = np.float32,
    *,
    group_size: int = GROUP_SIZE,
) -> np.ndarray:
    """Returns value * scale in `dtype`, with the unpacked shape.

    Args:
        scale: BF16 or float32, shape [..., ceil(k / group_size)].
        shape: unpacked shape, [..., k].
    Returns: for a BF16 scale float32 is exact and bfloat16 is the exact product rounded once.
    Raises: CheckpointError if the three shapes do not fit.
    Cost: host memory of the float32 result and, at first, of its int8 values.
    """
    shape = tuple(int(size) for size in shape)
    groups = -(-shape[-1] // group_size) if shape else 0
    if not shape or packed.shape[:-1] != shape[:-1] or scale.shape != (*shape[:-1], groups):
        raise CheckpointError(
            f"INT4 weight of shape {shape} has packed shape {packed.shape} and scale shape "
            f"{scale.shape}; expected the same leading axes and {groups} scales for groups of "
            f"{group_size}; check weight_shape"
        )
    values = unpack_int4(packed, shape[-1])
    weight = np.repeat(scale.astype(np.float32), group_size, axis=-1)[..., : shape[-1]]
    weight *= values
    return np.ascontiguousarray(weight).astype(dtype, copy=False)


def quantize_int4(
    weight: np.ndarray, group_size: int = GROUP_SIZE
) -> tuple[np.ndarray, np.ndarray]:
    """Returns packed int32 words and BF16 scales of a float32 weight, shape [..., k].

    The rule is that of compressed-tensors' min-max observer: scale = max|w| / 7.5 rounded to BF16,
    value = w / scale rounded half to even and clamped to [-8, 7].

    Returns: packed [..., ceil(k / 8)] and scale [..., k / group_size]. A group whose scale rounds
        to zero has scale 0 and values 0.
    Raises: CheckpointError for another dtype, a k that groups do not divide, or NaN or infinity.
    """
    if weight.dtype != np.float32 or weight.ndim < 1 or weight.shape[-1] % group_size:
        raise CheckpointError(
            f"a weight to quantize must be float32 with a last axis in groups of {group_size}, "
            f"found {weight.dtype} {weight.shape}; convert it or leave it unquantized"
        )
    if not np.isfinite(weight).all():
        raise CheckpointError(
            f"a weight of shape {weight.shape} to quantize holds NaN or infinity; check the "
            "checkpoint it comes from"
        )
    groups = weight.reshape(*weight.shape[:-1], weight.shape[-1] // group_size, group_size)
    scale = (np.abs(groups).max(axis=-1, initial=0) / np.float32(7.5)).astype(ml_dtypes.bfloat16)
    divisor = scale.astype(np.float32)
    # Such a group has only zeros, or numbers so small that they round to zero beside 1.
    divisor[divisor == 0] = 1
    values = np.clip(np.rint(groups / divisor[..., None]), -8, 7).astype(np.int8)
    return pack_int4(values.reshape(weight.shape)), scale


def check_weight_shape(
    weight_shape: np.ndarray,
    packed_shape: Sequence[int],
    scale_shape: Sequence[int],
    name: str,
    *,
    group_size: int = GROUP_SIZE,
) -> tuple[int, ...]:
    """Returns the unpacked shape that a `weight_shape` tensor states, if all three shapes agree.

    Args:
        weight_shape: I32 (the published files) or I64 (compressed-tensors today), one number an
            axis.
        name: of the weight, for the message.
    Raises: CheckpointError otherwise.
    """
    if weight_shape.dtype not in (np.int32, np.int64) or weight_shape.shape != (len(packed_shape),):
        raise CheckpointError(
            f"{name}: weight_shape must be I32 or I64 with {len(packed_shape)} numbers, found "
            f"{weight_shape.dtype} {weight_shape.shape}; download its file again"
        )
    shape = tuple(int(size) for size in weight_shape)
    if not shape or min(shape) < 1:
        raise CheckpointError(
            f"{name}: weight_shape is {shape}, expected positive sizes; download its file again"
        )
    packed = (*shape[:-1], -(-shape[-1] // VALUES_PER_WORD))
    scale = (*shape[:-1], -(-shape[-1] // group_size))
    if packed != tuple(packed_shape) or scale != tuple(scale_shape):
        raise CheckpointError(
            f"{name}: weight_shape {shape} in groups of {group_size} takes weight_packed {packed} "
            f"and weight_scale {scale}, found {tuple(packed_shape)} and {tuple(scale_shape)}; "
            "download its file again, or check group_size in config.json"
        )
    return shape
