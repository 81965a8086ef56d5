"""How a Pallas kernel is launched: one place for the backend, its parameters and its tiles.

Kernels use the Triton lowering, one source for all architectures. On the CPU they are interpreted,
which is for tests. The platform is the one of the mesh in context, so that a program can be
compiled for a GPU that is not there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k26jax.errors import KernelError

OLDEST_JAX = (0, 11, 2)
# Device kinds by the architecture whose tiles they take.
_KINDS = (
    (r"H100|H200|H800|GH200|H20\b", "sm_90"),
    (r"B100|B200|B300|GB200|GB300", "sm_100"),
    (r"RTX PRO|RTX 50|GB10", "sm_120"),
)


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut on one architecture.

    rows: tokens of one program.
    columns: outputs of one program (products) or keys of one block (attention).
    splits: parts a sum is cut into, whatever the number of rows.
    depth: elements of a sum that one step takes.
    chunk: tiles of outputs that one program takes in turn.
    parts: programs that share a sum and leave its parts to the reader; 0: one, whole.
    warps, stages: of one program.
    """

    rows: int = 16
    columns: int = 64
    splits: int = 1
    depth: int = 256
    chunk: int = 1
    parts: int = 0
    warps: int = 4
    stages: int = 3


def platform() -> str:
    """Returns the platform that programs are compiled for: "cpu", "gpu" or another."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def architecture() -> str | None:
    """Returns sm_90, sm_100 or sm_120; None where kernels are interpreted.

    Raises: KernelError for a GPU without tiles or a JAX without the kernels' compiler.
    """
    if platform() == "cpu":
        return None
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    kind = device.device_kind
    if jax.__version_info__ < OLDEST_JAX:
        raise KernelError(
            f"the GPU kernels need JAX {'.'.join(map(str, OLDEST_JAX))} (Python 3.12) or newer, "
            f"this is {jax.__version__}; update JAX or use kernels='reference'"
        )
    for pattern, name in _KINDS:
        if re.search(pattern, kind):
            return name
    raise KernelError(
        f"no kernel tiles for {kind!r} ({platform()}); known are Hopper and Blackwell GPUs; "
        "use kernels='reference'"
    )


def layer_operand(layer: int | jax.Array) -> jax.Array:
    """Returns a layer's number, int32 [1]: an operand, so one compiled kernel serves all layers."""
    return jnp.asarray(layer, jnp.int32).reshape(1)


def launch(
    kernel: Callable[..., None],
    *operands: jax.Array,
    name: str,
    grid: Sequence[int],
    out_shape: Any,
    tile: Tile,
    aliases: dict[int, int] | None = None,
) -> Any:
    """Returns the kernel's outputs; every reference is a whole array that the kernel indexes.

    Args:
      grid: at most three axes, the longest first (the others stay below 65,536).
      aliases: operand number -> output number that shares its memory.
    """
    with warnings.catch_warnings():
        # One source for three architectures; Mosaic GPU has none. Tracked in docs/kernels.md.
        warnings.filterwarnings("ignore", message=".*Pallas Triton backend is deprecated.*")
        return pl.pallas_call(
            _announced(kernel),
            grid=tuple(grid),
            out_shape=out_shape,
            compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=architecture() is None,
            input_output_aliases=aliases or {},
            name=name,
        )(*operands)


def _announced(kernel: Callable[..., None]) -> Callable[..., None]:
    """Returns the kernel, which first tells the card to make the next launch ready.

    The next kernel's programs then take their places and wait there for the end of this one,
    instead of being placed after it. XLA lets every kernel begin with that wait (programmatic
    dependent launch, `xla_gpu_enable_pdl`), but lets none say this.
    """
    if architecture() is None:
        return kernel

    def announced(*refs: Any) -> None:
        (place,) = plt.elementwise_inline_asm(
            "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
            args=[jnp.broadcast_to(pl.program_id(0), (1,))],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
        )
        # Always so; what nothing depends on would not be compiled.
        pl.when(jnp.max(place) >= 0)(lambda: kernel(*refs))

    return announced
