"""Chooses the implementation of norms, rotary embeddings and cache writes."""

from __future__ import annotations

from typing import Any

import jax

from k26jax.pallas.dispatch import select
from k26jax.pallas.norm import kernel, reference

IMPLEMENTATIONS = {"reference": reference, "pallas": kernel}


def rms_norm(x: jax.Array, gains: jax.Array, *, kernels: str = "auto", **kwargs: Any) -> jax.Array:
    """Returns normed rows; arguments as in `reference.rms_norm`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("rms_norm", kernels)(x, gains, **kwargs)


def add_rms_norm(
    x: jax.Array, change: jax.Array, gains: jax.Array, *, kernels: str = "auto", **kwargs: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns x + change in x's dtype, and that normed; see `reference.rms_norm`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("rms_norm", kernels)(x, gains, residual=change, **kwargs)


def latent(*args: Any, kernels: str = "auto", **kwargs: Any) -> tuple[jax.Array, ...]:
    """Returns c_kv, k_pe and the query latent; arguments as in `reference.latent`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("latent", kernels)(*args, **kwargs)


def head_norm(*args: Any, kernels: str = "auto", **kwargs: Any) -> jax.Array:
    """Returns heads normed and rotated; arguments as in `reference.head_norm`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("head_norm", kernels)(*args, **kwargs)


def append(*args: Any, kernels: str = "auto", **kwargs: Any) -> tuple[jax.Array, ...]:
    """Returns the caches with rows written; arguments as in `reference.append`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return _select("append", kernels)(*args, **kwargs)


def _select(operation: str, kernels: str) -> Any:
    forms = {name: getattr(module, operation) for name, module in IMPLEMENTATIONS.items()}
    return select(operation, forms, kernels)
