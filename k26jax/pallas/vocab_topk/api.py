"""Chooses the implementation of the search for the best tokens."""

from __future__ import annotations

from typing import Any

import jax

from k26jax.pallas.dispatch import select
from k26jax.pallas.vocab_topk import kernel, reference
from k26jax.pallas.vocab_topk.reference import TopTokens

IMPLEMENTATIONS = {"reference": reference.top_tokens, "pallas": kernel.top_tokens}
BEST = {"reference": reference.best_token, "pallas": kernel.best_token}


def top_tokens(*args: Any, kernels: str = "auto", **kwargs: Any) -> TopTokens:
    """Returns the best tokens of every row; arguments as in `reference.top_tokens`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return select("top_tokens", IMPLEMENTATIONS, kernels)(*args, **kwargs)


def best_token(*args: Any, kernels: str = "auto", **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the best token of every row; arguments as in `reference.best_token`.

    Raises: KernelError if `kernels` names an implementation that does not exist.
    """
    return select("best_token", BEST, kernels)(*args, **kwargs)
