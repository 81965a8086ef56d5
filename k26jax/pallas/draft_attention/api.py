"""Chooses the implementation of draft_attention."""

from __future__ import annotations

from typing import Any

import jax

from k26jax.pallas.dispatch import select
from k26jax.pallas.draft_attention import kernel, reference

IMPLEMENTATIONS = {
    "reference": reference.draft_attention,
    "pallas": kernel.draft_attention,
}


def draft_attention(*args: Any, kernels: str = "auto", **kwargs: Any) -> jax.Array:
    """Returns the attended values; arguments as in `reference.draft_attention`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return select("draft_attention", IMPLEMENTATIONS, kernels)(*args, **kwargs)
