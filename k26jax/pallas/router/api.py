"""Chooses the implementation of the router."""

from __future__ import annotations

from typing import Any

import jax

from k26jax.pallas.dispatch import select
from k26jax.pallas.router import reference

IMPLEMENTATIONS = {"reference": reference.route}


def route(*args: Any, kernels: str = "auto", **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """Returns chosen experts and their weights; arguments as in `reference.route`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return select("router", IMPLEMENTATIONS, kernels)(*args, **kwargs)
