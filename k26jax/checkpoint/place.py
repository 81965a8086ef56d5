"""Puts stacked parameters on devices, some layers at a time, each device its own part.

Must not know files: it asks for a region of one published tensor at a time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from k26jax.errors import CheckpointError
from k26jax.model.parameters import Declaration

# Gives the values of one tensor's region; slices have step 1.
Read = Callable[[str, tuple[slice, ...]], np.ndarray]
ShardingFor = Callable[[tuple[str, ...]], Sharding]
Bounds = tuple[tuple[int, int], ...]

BLOCK_BYTES = 256 << 20  # of layers that travel together; a larger layer travels alone
_MAX_THREADS = 16


def on_one_device(axes: tuple[str, ...]) -> Sharding:
    """Returns the placement on the default device, whatever the axes."""
    return jnp.zeros(()).sharding


def reading_threads() -> ThreadPoolExecutor:
    """Returns a pool for reading: as many threads as processors, up to a bound."""
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))


def place_parameter(
    declaration: Declaration,
    names: Sequence[tuple[tuple[int, ...], str]],
    read: Read,
    sharding: Sharding,
    pool: ThreadPoolExecutor,
    *,
    on_read: Callable[[str], None] = lambda name: None,
) -> jax.Array:
    """Returns one parameter on its devices.

    Args:
      names: (index into the stack, tensor) of every tensor.
      read: called from several threads.
      on_read: called with each tensor of which anything was read.

    Raises: what `read` raises, or CheckpointError if the layer axis is cut.
    Cost: each tensor is read once, the rows that some device here needs; host memory for the
      local parts of one layer or of `BLOCK_BYTES`, and the same on the devices beside the result.
    """
    shape = declaration.shape
    parts: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        parts.setdefault(bounds, []).append(device)
    is_stacked = declaration.source.layers is not None
    if is_stacked and any(bounds[0] != (0, shape[0]) for bounds in parts):
        raise CheckpointError(
            f"{declaration.source.template}: its layer axis cannot be cut over devices; cut another"
        )
    layers = shape[0] if is_stacked else 1
    step = _layers_a_block(parts, layers, declaration) if is_stacked else 1
    result = None
    for first in range(0, layers, step):
        count = min(step, layers - first)
        chosen = [(i, n) for i, n in names if not i or first <= i[0] < first + count]
        cut = {_of_layers(b, first, count) if is_stacked else b: d for b, d in parts.items()}
        block = _block(declaration, chosen, cut, read, pool, on_read)
        block_shape = (count, *shape[1:]) if is_stacked else shape
        arrays = [
            jax.device_put(block[bounds], device)
            for bounds, devices in cut.items()
            for device in devices
        ]
        piece = jax.make_array_from_single_device_arrays(block_shape, sharding, arrays)
        if count == layers:
            return piece
        if result is None:
            result = _zeros(shape, declaration.dtype, sharding)
        result = _write(sharding)(result, piece, first)
        del block, arrays, piece
    assert result is not None
    return result


def _layers_a_block(parts: dict[Bounds, Any], layers: int, declaration: Declaration) -> int:
    local = sum(_volume(bounds) for bounds in parts) * declaration.dtype.itemsize
    return max(1, min(layers, BLOCK_BYTES * layers // max(local, 1)))


def _volume(bounds: Bounds) -> int:
    return int(np.prod([stop - start for start, stop in bounds], dtype=np.int64))


def _of_layers(bounds: Bounds, first: int, count: int) -> Bounds:
    return ((first, first + count), *bounds[1:])


def _block(
    declaration: Declaration,
    names: Sequence[tuple[tuple[int, ...], str]],
    parts: dict[Bounds, list[Any]],
    read: Read,
    pool: ThreadPoolExecutor,
    on_read: Callable[[str], None],
) -> dict[Bounds, np.ndarray]:
    """Returns the host values of every distinct part of some layers."""
    block = {
        bounds: np.empty([stop - start for start, stop in bounds], declaration.dtype)
        for bounds in parts
    }

    def fill(index: tuple[int, ...], name: str) -> str | None:
        rank = len(index)
        wanted = [
            bounds
            for bounds in block
            if all(start <= i < stop for i, (start, stop) in zip(index, bounds, strict=False))
        ]
        if not wanted:
            return None
        inner = [bounds[rank:] for bounds in wanted]
        hull = [
            (min(b[0] for b in axis), max(b[1] for b in axis)) for axis in zip(*inner, strict=True)
        ]
        values = read(name, tuple(slice(*bounds) for bounds in hull))
        for bounds in wanted:
            row = tuple(i - start for i, (start, _) in zip(index, bounds, strict=False))
            region = tuple(
                slice(start - low, stop - low)
                for (start, stop), (low, _) in zip(bounds[rank:], hull, strict=True)
            )
            block[bounds][row] = values[region]
        return name

    for name in pool.map(lambda item: fill(*item), names):
        if name is not None:
            on_read(name)
    return block


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


@functools.lru_cache(maxsize=64)
def _write(sharding: Sharding) -> Any:
    """Returns a program that writes layers into a stack in place."""

    def write(stack: jax.Array, layers: jax.Array, first: Any) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(stack, layers, first, axis=0)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)
