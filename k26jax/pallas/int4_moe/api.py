"""Chooses the implementation of the routed experts."""

from __future__ import annotations

from typing import Any

import jax

from k26jax.pallas.dispatch import select
from k26jax.pallas.int4_moe import reference

IMPLEMENTATIONS = {"reference": reference.experts}


def experts(
    *args: Any, kernels: str = "auto", differentiable: bool = False, **kwargs: Any
) -> jax.Array:
    """Returns the weighted sum of the chosen experts; arguments as in `reference.experts`.

    Args:
      differentiable: run every expert on every row, for training and as the plainest reference.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    if differentiable:
        return reference.dense(*args, **kwargs)
    return select("int4_moe", IMPLEMENTATIONS, kernels)(*args, **kwargs)
