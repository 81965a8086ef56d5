"""Stage params: fills a model's declared parameters from a checkpoint, after checking all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from k26jax.checkpoint.fp8 import dequantize_fp8_blocks
from k26jax.checkpoint.int4 import check_weight_shape
from k26jax.checkpoint.reader import Checkpoint
from k26jax.config.quantization import FP8_BLOCK
from k26jax.errors import CheckpointError
from k26jax.model.parameters import Declaration, Params, declarations, nest

Progress = Callable[[int], None]

_HINT = "config.json and the weight files must belong to the same model"


def load_params(
    checkpoint: Checkpoint,
    module: nnx.Module,
    *,
    progress: Progress | None = None,
    places: Mapping[str, Sharding] | None = None,
) -> Params:
    """Returns the parameters of an abstract module, on the default device or in their places.

    Every name, shape and dtype is checked before the first weight is read. Float tensors are
    converted to the declared dtype; FP8 blocks are dequantized to bfloat16 first; INT4 words stay.

    Args:
      progress: called with the bytes of each tensor read.
      places: by parameter path, where its parts go; this process reads what its devices hold.

    Raises: CheckpointError naming every kind of missing, leftover or ill-formed tensor.
    Cost: host memory for the largest stack, or for the largest part that a device holds.
    """
    plan = plan_load(checkpoint, module)
    loaded = {}
    for path, (declaration, names) in plan.items():
        if places is not None:
            loaded[path] = _read_parts(checkpoint, declaration, names, places[path], progress)
            continue
        host = np.empty(declaration.shape, declaration.dtype)
        for index, name in names:
            host[index] = _read(checkpoint, name, declaration)
            if progress:
                progress(_stored_bytes(checkpoint, name))
        loaded[path] = jnp.asarray(host)
    return nest(loaded)


def _read_parts(
    checkpoint: Checkpoint,
    declaration: Declaration,
    names: list[tuple[tuple[int, ...], str]],
    place: Sharding,
    progress: Progress | None,
) -> jax.Array:
    """Returns a stack in its place; a part that several devices hold is read once."""
    shape = declaration.shape
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, cut in place.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(cut or (), shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    parts = []
    for number, (bounds, devices) in enumerate(holders.items()):
        host = np.empty([stop - start for start, stop in bounds], declaration.dtype)
        for index, name in names:
            lead, rest = bounds[: len(index)], bounds[len(index) :]
            if all(start <= i < stop for i, (start, stop) in zip(index, lead, strict=True)):
                at = tuple(i - start for i, (start, _) in zip(index, lead, strict=True))
                tensor = _read(checkpoint, name, declaration)
                host[at] = tensor[tuple(slice(*part) for part in rest)]
            if progress:
                size, count = _stored_bytes(checkpoint, name), len(holders)
                progress(size * (number + 1) // count - size * number // count)
        parts += [jax.device_put(host, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, place, parts)


Plan = dict[str, tuple[Declaration, list[tuple[tuple[int, ...], str]]]]


def plan_load(checkpoint: Checkpoint, module: nnx.Module) -> Plan:
    """Returns, by parameter path, the declaration and the tensors that fill it.

    Raises: CheckpointError unless the checkpoint holds exactly the declared tensors.
    """
    known = set(checkpoint.names())
    # Published drafters have bare names; some exports put "model." in front of all of them.
    prefix = "model." if known and all(name.startswith("model.") for name in known) else ""
    plan: Plan = {}
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
            used.update(_check(checkpoint, name, declaration))
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


def _check(checkpoint: Checkpoint, name: str, declaration: Declaration) -> Iterator[str]:
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
        if f"{stem}_shape" in checkpoint:
            shape = checkpoint.read(f"{stem}_shape")
            scale = checkpoint.entry(f"{stem}_scale")
            stated = check_weight_shape(shape, tuple(entry.shape), tuple(scale.shape), name)
            # Groups of 32 fill whole words, so the packed width leaves no choice.
            if stated[-1] != 8 * entry.shape[-1]:
                raise CheckpointError(
                    f"{entry.file}: tensor {stem + '_shape'!r} is {list(stated)}, expected "
                    f"{[*entry.shape[:-1], 8 * entry.shape[-1]]} from config.json; {_HINT}"
                )
            yield f"{stem}_shape"


def _read(checkpoint: Checkpoint, name: str, declaration: Declaration) -> np.ndarray:
    tensor = checkpoint.read(name)
    if tensor.dtype == ml_dtypes.float8_e4m3fn:
        tensor = dequantize_fp8_blocks(tensor, checkpoint.read(f"{name}_scale_inv"))
    return _cast(tensor, declaration.dtype).reshape(declaration.shape[-_rank(declaration) :])


def _rank(declaration: Declaration) -> int:
    source = declaration.source
    return len(declaration.shape) - (source.layers is not None) - (source.experts is not None)


def _cast(tensor: np.ndarray, dtype: Any) -> np.ndarray:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def _stored_bytes(checkpoint: Checkpoint, name: str) -> int:
    entry = checkpoint.entry(name)
    return entry.end - entry.begin
