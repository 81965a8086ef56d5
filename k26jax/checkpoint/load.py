"""Stage params: fills a model's declared parameters from a checkpoint, after checking all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from k26jax.checkpoint.fp8 import dequantize_fp8_blocks
from k26jax.checkpoint.int4 import check_weight_shape
from k26jax.checkpoint.place import ShardingFor, on_one_device, place_parameter, reading_threads
from k26jax.checkpoint.reader import Checkpoint
from k26jax.config.quantization import FP8_BLOCK
from k26jax.errors import CheckpointError
from k26jax.model.parameters import Declaration, Params, declarations, nest

Progress = Callable[[int], None]

_SEEKING_THREADS = 16  # a disk answers many small questions faster at once
_SCANNED_BYTES = 1 << 20
_SOUND = "download or convert it again"
_HINT = "config.json and the weight files must belong to the same model"


def load_params(
    checkpoint: Checkpoint,
    module: nnx.Module,
    *,
    sharding_for: ShardingFor = on_one_device,
    progress: Progress | None = None,
) -> Params:
    """Returns the parameters of an abstract module on their devices.

    Every name, shape and dtype is checked before the first weight is read. Float tensors are
    converted to the declared dtype; FP8 blocks are dequantized to bfloat16 first; INT4 words stay.

    Args:
      sharding_for: called with a parameter's logical axes; any sharding that leaves the layer axis
        whole, over any devices. Default: all on the default device.
      progress: called with the bytes of each tensor read.

    Raises: CheckpointError naming every kind of missing, leftover or ill-formed tensor, or a small
      one that holds NaN or infinity.
    Cost: host memory for the local parts of one layer's largest parameter, or of `BLOCK_BYTES`.
    """
    plan = plan_load(checkpoint, module)
    loaded = {}
    with reading_threads() as pool:
        for path, (declaration, names) in plan.items():

            def read(
                name: str, region: tuple[slice, ...], declaration: Declaration = declaration
            ) -> np.ndarray:
                shape = declaration.shape[-_rank(declaration) :]
                values = read_as(checkpoint, name, declaration.dtype, region, shape)
                # Norms, biases and scales, whose faults spread furthest and cost least to see.
                fault = value_fault(name, values) if values.nbytes <= _SCANNED_BYTES else None
                if fault:
                    raise CheckpointError(f"{checkpoint.folder}: {fault}; {_SOUND}")
                return values

            loaded[path] = place_parameter(
                declaration,
                names,
                read,
                sharding_for(declaration.axes),
                pool,
                on_read=lambda name: progress and progress(_stored_bytes(checkpoint, name)),
            )
    return nest(loaded)


Plan = dict[str, tuple[Declaration, list[tuple[tuple[int, ...], str]]]]


def plan_load(checkpoint: Checkpoint, module: nnx.Module) -> Plan:
    """Returns, by parameter path, the declaration and the tensors that fill it.

    Raises: CheckpointError unless the checkpoint holds exactly the declared tensors.
    """
    known = set(checkpoint.names())
    # Published drafters have bare names; some exports put "model." in front of all of them.
    prefix = "model." if known and all(name.startswith("model.") for name in known) else ""
    plan: Plan = {}
    shapes = _stated_shapes(checkpoint)
    used: set[str] = set()
    missing: list[str] = []
    for path, declaration in declarations(module).items():
        names = []
        for index, name in declaration.source.names():
            if prefix and name not in known and prefix + name in known:
                name = prefix + name
            if name not in known:
                missing.append(name)
                continue
            used.update(_check(checkpoint, name, declaration, shapes))
            names.append((index, name))
        plan[path] = (declaration, names)
    _refuse_gaps(checkpoint, module, missing, sorted(known - used))
    return plan


def _refuse_gaps(
    checkpoint: Checkpoint, module: nnx.Module, missing: list[str], leftover: list[str]
) -> None:
    if getattr(getattr(module, "config", None), "tie_word_embeddings", False):
        leftover = [name for name in leftover if name != "lm_head.weight"]
    if missing or leftover:
        parts = []
        if missing:
            parts.append(f"{len(missing)} tensors are missing, first {_first(missing)}")
        if leftover:
            parts.append(f"{len(leftover)} tensors are not of this model, first {_first(leftover)}")
        raise CheckpointError(f"{checkpoint.folder}: {'; '.join(parts)}; {_HINT}")


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _stated_shapes(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Returns the `weight_shape` tensors, of eight bytes each and all over the files."""
    names = [name for name in checkpoint.names() if name.endswith(".weight_shape")]
    with ThreadPoolExecutor(_SEEKING_THREADS) as pool:
        return dict(zip(names, pool.map(checkpoint.copy, names), strict=True))


def _check(
    checkpoint: Checkpoint, name: str, declaration: Declaration, shapes: dict[str, np.ndarray]
) -> Iterator[str]:
    """Yields the tensor's name and its companions' after checking shape and dtype."""
    entry = checkpoint.entry(name)
    if entry.dtype not in declaration.source.published_dtypes:
        allowed = ", ".join(declaration.source.published_dtypes)
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} has dtype {entry.dtype}, expected one of {allowed}; "
            f"{_HINT}"
        )
    if tuple(entry.shape) != declaration.tensor_shape:
        raise CheckpointError(
            f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}, "
            f"expected {list(declaration.tensor_shape)} from config.json; {_HINT}"
        )
    yield name
    if entry.dtype == "F8_E4M3":
        scale = f"{name}_scale_inv"
        blocks = tuple(-(-n // size) for n, size in zip(entry.shape, FP8_BLOCK, strict=True))
        found = checkpoint.entry(scale)
        if tuple(found.shape) != blocks or found.dtype != "F32":
            raise CheckpointError(
                f"{found.file}: tensor {scale!r} is {found.dtype} {list(found.shape)}, "
                f"expected F32 {list(blocks)}: one scale per 128x128 block of {name!r}"
            )
        yield scale
    if name.endswith(".weight_packed"):
        stem = name.removesuffix("_packed")
        if f"{stem}_shape" in shapes:
            shape = shapes[f"{stem}_shape"]
            scale = checkpoint.entry(f"{stem}_scale")
            stated = check_weight_shape(shape, tuple(entry.shape), tuple(scale.shape), name)
            # Groups of 32 fill whole words, so the packed width leaves no choice.
            if stated[-1] != 8 * entry.shape[-1]:
                raise CheckpointError(
                    f"{entry.file}: tensor {stem + '_shape'!r} is {list(stated)}, expected "
                    f"{[*entry.shape[:-1], 8 * entry.shape[-1]]} from config.json; {_HINT}"
                )
            yield f"{stem}_shape"


def read_as(
    checkpoint: Checkpoint,
    name: str,
    dtype: Any,
    region: tuple[slice, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Returns a region of a tensor in a dtype, FP8 blocks dequantized to bfloat16 on the way.

    Args:
      shape: to see the tensor in; default: its own.
    """
    if checkpoint.entry(name).dtype != "F8_E4M3":
        return _cast(checkpoint.copy(name, region, shape), dtype)
    # Blocks run over the edges of regions, and such tensors are small beside a layer.
    scales = checkpoint.copy(f"{name}_scale_inv")
    tensor = dequantize_fp8_blocks(checkpoint.copy(name), scales, name=name)
    tensor = tensor if shape is None else tensor.reshape(shape)
    return _cast(tensor[region or ()], dtype)


def value_fault(name: str, values: np.ndarray) -> str | None:
    """Returns what is wrong with a tensor's values: NaN or infinity; None for integers."""
    if values.dtype == ml_dtypes.bfloat16:
        # All bits of the exponent set: far cheaper to see than a conversion.
        bad = int(np.count_nonzero((values.view(np.uint16) & 0x7F80) == 0x7F80))
    elif values.dtype.kind == "f":
        bad = int(np.count_nonzero(~np.isfinite(values)))
    else:
        return None
    return f"tensor {name!r} holds {bad} values that are NaN or infinite" if bad else None


def _rank(declaration: Declaration) -> int:
    source = declaration.source
    return len(declaration.shape) - (source.layers is not None) - (source.experts is not None)


def _cast(tensor: np.ndarray, dtype: Any) -> np.ndarray:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def _stored_bytes(checkpoint: Checkpoint, name: str) -> int:
    entry = checkpoint.entry(name)
    return entry.end - entry.begin
