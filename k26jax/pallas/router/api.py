"""Chooses the implementation of the router and of the experts' work list."""

from __future__ import annotations

from typing import Any

import jax

from k26jax.pallas.dispatch import select
from k26jax.pallas.router import kernel, reference
from k26jax.pallas.router.reference import Blocks

IMPLEMENTATIONS = {"reference": reference.route, "pallas": kernel.route}
BLOCK_LISTS = {"reference": reference.block_list, "pallas": kernel.block_list}
BOTH = {"reference": reference.route_and_list, "pallas": kernel.route_and_list}


def route(*args: Any, kernels: str = "auto", **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """Returns chosen experts and their weights; arguments as in `reference.route`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return select("router", IMPLEMENTATIONS, kernels)(*args, **kwargs)


def block_list(*args: Any, kernels: str = "auto", **kwargs: Any) -> Blocks:
    """Returns the experts' work list; arguments as in `reference.block_list`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return select("block_list", BLOCK_LISTS, kernels)(*args, **kwargs)


def route_and_list(
    *args: Any, kernels: str = "auto", **kwargs: Any
) -> tuple[jax.Array, jax.Array, Blocks]:
    """Returns chosen experts, weights and work list; arguments as in `reference.route_and_list`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return select("route_and_list", BOTH, kernels)(*args, **kwargs)
