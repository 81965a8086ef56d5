"""Writes and opens the Orbax trees of a converted folder (OCDBT, Zarr, uncompressed).

An array is written block by block as its values come, so that no array, and still less a tree,
is ever whole in host memory. Any Orbax or TensorStore program can read the result.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

MAX_WAITING_BYTES = 256 << 20  # handed over and not yet on disk

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
        opened = []
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
            opened.append(ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context))
        writes = _Writes()
        try:
            for value, store in zip(values, await _all(opened), strict=True):
                for rows, block in value.blocks():
                    await writes.make_room(block.nbytes)
                    target = store[rows] if value.shape else store
                    write = target.write(block, can_reference_source_data_indefinitely=True)
                    writes.add(write, block.nbytes)
        finally:
            # Also after an error: what is under way needs this loop to end in.
            await writes.drain()
        return []


class _Writes:
    """Writes under way, of bounded size; those of small arrays share a commit to disk."""

    def __init__(self) -> None:
        self._queue: collections.deque[tuple[Any, int]] = collections.deque()
        self._bytes = 0

    def add(self, write: Any, size: int) -> None:
        """Counts a write that was started."""
        self._queue.append((write, size))
        self._bytes += size

    async def make_room(self, size: int) -> None:
        """Waits until so many bytes more may be under way."""
        while self._queue and self._bytes + size > MAX_WAITING_BYTES:
            write, done = self._queue.popleft()
            self._bytes -= done
            await write

    async def drain(self) -> None:
        """Waits for all of them, then raises the first error there was."""
        queue, self._queue = self._queue, collections.deque()
        await _all([write for write, _ in queue])


async def _all(futures: list[Any]) -> list[Any]:
    """Returns the results of futures; an error is raised when all have ended."""
    results = await asyncio.gather(*futures, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


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
