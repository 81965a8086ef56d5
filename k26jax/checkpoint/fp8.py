"""Dequantizes FP8 weights that carry one float32 scale a block (`weight_scale_inv`).

NumPy only; must not know which tensors of a model are quantized.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from k26jax.errors import CheckpointError


def dequantize_fp8_blocks(
    weight: np.ndarray,
    scale_inv: np.ndarray,
    block: tuple[int, int] = (128, 128),
    *,
    name: str = "FP8 weight",
) -> np.ndarray:
    """Returns weight * scale_inv as bfloat16, the float32 product rounded once.

    Args:
        weight: float8_e4m3fn [o, i]; the last block of a row or column may be cut short.
        scale_inv: float32 [ceil(o / block[0]), ceil(i / block[1])].
        name: of the weight, for the message.
    Returns: bfloat16 [o, i].
    Raises: CheckpointError if dtypes or shapes do not fit.
    Cost: host memory of the result and one float32 row of blocks.
    """
    if weight.dtype != ml_dtypes.float8_e4m3fn or weight.ndim != 2:
        raise CheckpointError(
            f"{name}: an FP8 weight must be float8_e4m3fn with two axes, found {weight.dtype} "
            f"{weight.shape}; check quantization_config in config.json"
        )
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if scale_inv.dtype != np.float32 or scale_inv.shape != grid:
        raise CheckpointError(
            f"{name}: weight {weight.shape} in blocks of {tuple(block)} takes float32 scales "
            f"{grid}, found {scale_inv.dtype} {scale_inv.shape}; check weight_block_size in "
            "config.json"
        )
    result = np.empty(weight.shape, ml_dtypes.bfloat16)
    for row_block, scales in enumerate(scale_inv):
        part = slice(row_block * block[0], (row_block + 1) * block[0])
        product = weight[part].astype(np.float32)
        product *= np.repeat(scales, block[1])[:columns]
        result[part] = product  # the one rounding
    return result
