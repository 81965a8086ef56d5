"""Kimi K2.6 and its relatives in JAX, with DDTree speculative decoding.

The public names load on first use: `import k26jax` imports no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k26jax.engine.output import RequestOutput
    from k26jax.engine.request import SamplingParams
    from k26jax.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "k26jax.llm",
    "RequestOutput": "k26jax.engine.output",
    "SamplingParams": "k26jax.engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'k26jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
