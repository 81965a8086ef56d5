"""Chooses the implementation of tree_mla."""

from __future__ import annotations

from typing import Any

import jax

from k26jax.pallas.dispatch import select
from k26jax.pallas.tree_mla import kernel, reference

IMPLEMENTATIONS = {"reference": reference.tree_mla, "pallas": kernel.tree_mla}


def tree_mla(*args: Any, kernels: str = "auto", **kwargs: Any) -> jax.Array:
    """Returns the attended latents; arguments as in `reference.tree_mla`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return select("tree_mla", IMPLEMENTATIONS, kernels)(*args, **kwargs)
