"""Writes and opens the Orbax trees of a converted folder (OCDBT, Zarr, uncompressed).

An array is written block by block as its values come, so that no array, and still less a tree,
is ever whole in host memory. Any Orbax or TensorStore program can read the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

Blocks = Callable[[], Iterator[tuple[slice, np.ndarray]]]


@dataclass(frozen=True)
class Streamed:
    """An array whose values come as (rows of the first axis, values)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    blocks: Blocks

    @property
    def ndim(self) -> int:
        """Number of axes, as Orbax asks for it."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize


class _StreamedHandler(type_handlers.NumpyHandler):
    """Writes `Streamed` leaves; what it leaves on disk is a NumPy leaf to everyone else."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
        for value, info, arg in zip(values, infos, args, strict=True):
            await info.await_path_creation()
            spec = type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=True,
                global_shape=value.shape,
                local_shape=value.chunk,
                dtype=value.dtype,
                process_index=0,
                arg=arg,
            )
            store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
            under_way = None
            for rows, block in value.blocks():
                # The next block is read while this one is written.
                if under_way is not None:
                    await under_way
                target = store[rows] if value.shape else store
                under_way = target.write(block, can_reference_source_data_indefinitely=True)
            if under_way is not None:
                await under_way
        return []


def save_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Writes a nested dict of `Streamed` as one Orbax tree; the folder appears when it is whole.

    Raises: what `blocks` raises, and OSError or ValueError where the disk refuses.
    """
    # Orbax warns that its device arrays are not registered; none are written here.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        registry = type_handlers.create_type_handler_registry((Streamed, _StreamedHandler()))
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_compression=False, type_handler_registry=registry
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder.absolute(), tree)
    finally:
        logger.setLevel(level)
