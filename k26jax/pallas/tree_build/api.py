"""Chooses the implementation of tree building."""

from __future__ import annotations

from typing import Any

from k26jax.pallas.dispatch import select
from k26jax.pallas.tree_build import kernel, reference
from k26jax.pallas.tree_build.reference import Nodes

IMPLEMENTATIONS = {"reference": reference.build, "pallas": kernel.build}


def build(*args: Any, kernels: str = "auto", **kwargs: Any) -> Nodes:
    """Returns best-first trees; arguments as in `reference.build`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return select("tree_build", IMPLEMENTATIONS, kernels)(*args, **kwargs)
