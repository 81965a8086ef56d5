"""Chooses the implementation of the products with float weights."""

from __future__ import annotations

from typing import Any

import jax

from k26jax.pallas.dense import kernel, reference
from k26jax.pallas.dispatch import select

IMPLEMENTATIONS = {"reference": reference, "pallas": kernel}


def dense(*args: Any, kernels: str = "auto", **kwargs: Any) -> tuple[jax.Array, ...]:
    """Returns x times each of several weights; arguments as in `reference.dense`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("dense", kernels)(*args, **kwargs)


def partial_sums(*args: Any, kernels: str = "auto", **kwargs: Any) -> tuple[jax.Array, ...]:
    """Returns products in parts, for a reader that adds them; see `reference.partial_sums`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("partial_sums", kernels)(*args, **kwargs)


def gated(*args: Any, kernels: str = "auto", **kwargs: Any) -> tuple[jax.Array, ...]:
    """Returns SwiGLU's inner rows and other products; arguments as in `reference.gated`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("gated", kernels)(*args, **kwargs)


def absorb(*args: Any, kernels: str = "auto", **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """Returns q_latent and q_pe; arguments as in `reference.absorb`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("absorb", kernels)(*args, **kwargs)


def values(*args: Any, kernels: str = "auto", **kwargs: Any) -> jax.Array:
    """Returns the values of attended latents; arguments as in `reference.values`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("values", kernels)(*args, **kwargs)


def _select(operation: str, kernels: str) -> Any:
    forms = {name: getattr(module, operation) for name, module in IMPLEMENTATIONS.items()}
    return select(operation, forms, kernels)
