"""Chooses the implementation of the routed experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from k26jax.pallas.dispatch import select
from k26jax.pallas.int4_moe import reference
from k26jax.pallas.tiles import tile

# Rows of one block of the work list of a step, whichever implementation reads it: one number, for
# a row's bits must not depend on how many there are.
BLOCK_ROWS = 8
_MOST_ROWS = 64
IMPLEMENTATIONS = {"reference": reference.experts}


def expert_columns() -> int:
    """Returns the outputs of one tile of the kernel's layout on the GPU in context."""
    return tile("int4_moe_up").columns


def prompt_block_rows(pairs: int, n_experts: int) -> int:
    """Returns the rows of a block for a prompt's pairs: about as many as an expert gets.

    A block decodes its expert's weights once, so blocks that are small decode them several times.
    """
    each = pl.next_power_of_2(max(pairs // n_experts, 1))
    return max(BLOCK_ROWS, min(each, _MOST_ROWS))


def experts(
    x: jax.Array,
    *args: Any,
    layer: int,
    shared: reference.Shared | None = None,
    dtype: DTypeLike = jnp.float32,
    kernels: str = "auto",
    differentiable: bool = False,
) -> jax.Array:
    """Returns the weighted sum of the chosen experts; arguments as in `reference.experts`.

    Canonical weights; `arrange` and `tiled_experts` are the kernel's way.

    Args:
      shared: the shared expert, added last.
      dtype: of the result; another one than x's is for one rank's part of it.
      differentiable: run every expert on every row, for training and as the plainest reference.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    if differentiable:
        routed = reference.dense(x, *args, layer=layer)
    else:
        routed = select("int4_moe", IMPLEMENTATIONS, kernels)(x, *args, layer=layer)
    if shared is not None:
        is_whole = jnp.dtype(dtype) == x.dtype
        routed = reference.add_shared(routed, shared, layer=layer, kind=x.dtype, is_whole=is_whole)
    return routed.astype(dtype)
