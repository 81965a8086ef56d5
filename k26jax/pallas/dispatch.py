"""Chooses the implementation of an operation; a choice made by name never falls back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from k26jax.errors import KernelError, nearest


def select(
    operation: str, implementations: Mapping[str, Callable[..., Any]], choice: str
) -> Callable[..., Any]:
    """Returns the implementation of `operation` that `choice` names.

    Args:
      implementations: by name; "reference" is always the first.
      choice: a name, or "auto" for the first; an engine settles "auto" when it loads a model.

    Raises: KernelError if the operation has no implementation of that name.
    """
    if choice == "auto":
        return next(iter(implementations.values()))
    if choice not in implementations:
        raise KernelError(
            f"{operation} has no {choice!r} implementation; it has "
            f"{', '.join(implementations)}{nearest(choice, implementations)}; "
            "use kernels='auto' or 'reference'"
        )
    return implementations[choice]
