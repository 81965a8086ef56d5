"""What XLA is told when it compiles the programs of an engine."""

from __future__ import annotations

from typing import Any

import jax

# Left to itself XLA skips a rounding between operations it fuses, so a prefill that also gives the
# drafter its features would leave other bits in the cache than one that does not.
_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
# On a GPU XLA picks its products by timing them, so two starts could pick two orders of a sum.
_GPU_OPTIONS: dict[str, Any] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}


def compile_options() -> dict[str, Any]:
    """Returns what XLA is told for every program that computes rows of the models."""
    return _OPTIONS | (_GPU_OPTIONS if jax.default_backend() == "gpu" else {})
