"""Opens a folder that `k26jax convert` made: the published tensors, out of Orbax trees.

Imports TensorStore alone of what Orbax needs; must not know how tensors become parameters.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from k26jax.checkpoint.index import DTYPES, TensorEntry
from k26jax.checkpoint.manifest import ArrayRecord, TreeRecord, read_manifest
from k26jax.checkpoint.reader import Checkpoint, reason_to_skip
from k26jax.errors import CheckpointError

FAILED_MARK = "k26jax_verify_failed.json"
UNREADABLE = "cannot be read"


def open_converted(
    folder: Path,
    *,
    num_hidden_layers: int | None = None,
    is_trusted: bool = True,
    without: Sequence[str] = (),
) -> ConvertedCheckpoint:
    """Returns a converted folder's tensors under canonical names, by its manifest.

    Args:
        is_trusted: refuse a folder that `k26jax verify` marked.
        without: trees to leave out.
    Raises: CheckpointError if the manifest is damaged, a tree is missing, or `k26jax verify` found
        a fault here and the folder has not passed since.
    Cost: reads the manifest only.
    """
    manifest = read_manifest(folder)
    if is_trusted:
        _refuse_failed(folder)
    places: dict[str, tuple[TreeRecord, ArrayRecord, int]] = {}
    entries: dict[str, TensorEntry] = {}
    skipped: dict[str, str] = {}
    for tree, array in manifest.arrays():
        if tree.name in without:
            continue
        for index, name in enumerate(array.tensors):
            reason = reason_to_skip(name, num_hidden_layers)
            if reason:
                skipped[name] = reason
                continue
            size = math.prod(array.tensor_shape) * DTYPES[array.dtype].itemsize
            place = folder / tree.name
            entries[name] = TensorEntry(name, array.dtype, array.tensor_shape, place, 0, size)
            places[name] = (tree, array, index)
    for tree in dict.fromkeys(tree.name for tree, _, _ in places.values()):
        if not (folder / tree).is_dir():
            raise CheckpointError(
                f"{folder} lacks its tree {tree}; copy it from where the folder came from, or "
                "convert the published folder again"
            )
    return ConvertedCheckpoint(folder, entries, skipped, places)


class ConvertedCheckpoint(Checkpoint):
    """The tensors of a converted folder; an array is opened when one of its tensors is read."""

    def __init__(
        self,
        folder: Path,
        entries: dict[str, TensorEntry],
        skipped: dict[str, str],
        places: dict[str, tuple[TreeRecord, ArrayRecord, int]],
    ) -> None:
        super().__init__(folder, entries, skipped, (), {})
        self._places = places
        self._stores: dict[tuple[str, str], Any] = {}
        self._store_lock = threading.Lock()

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor; unlike a published folder's it is a copy."""
        return self.copy(name)

    def copy(
        self,
        name: str,
        region: Sequence[slice] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """Returns a new array with a tensor's region.

        Args:
            region: one slice of step 1 an axis of `shape`; None: all of it.
            shape: to see the tensor in, row-major; default: its own.
        Raises: CheckpointError if there is no such tensor, or its tree is damaged.
        Cost: reads the chunks that the region touches.
        """
        self.entry(name)
        tree, array, index = self._places[name]
        shape = array.tensor_shape if shape is None else shape
        stored = array.shape[1:] if array.experts else array.shape
        store = self._open(tree, array)
        if array.experts:
            store = store[index]
        parts = tuple(region) if region else ()
        try:
            if shape == stored:
                return np.asarray((store[parts] if parts else store).read().result())
            return np.asarray(store.read().result()).reshape(shape)[parts]
        except (ValueError, OSError) as error:
            raise _damaged(self.folder / tree.name, array, error) from error

    def close(self) -> None:
        """Forgets the opened arrays."""
        super().close()
        with self._store_lock:
            self._stores.clear()

    def _open(self, tree: TreeRecord, array: ArrayRecord) -> Any:
        key = (tree.name, array.path)
        with self._store_lock:
            if self._is_closed:
                raise self._closed()
            if key not in self._stores:
                self._stores[key] = open_array(self.folder, tree, array)
            return self._stores[key]


def open_array(folder: Path, tree: TreeRecord, array: ArrayRecord) -> Any:
    """Returns an array of a tree as a TensorStore.

    Raises: CheckpointError if it cannot be opened, or has another shape or dtype than recorded.
    """
    place = folder / tree.name
    kvstore = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{place.absolute()}/"},
        "path": f"{array.path}/",
    }
    try:
        store = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()
    except (ValueError, OSError) as error:
        raise _damaged(place, array, error) from error
    if tuple(store.shape) != array.shape or store.dtype.numpy_dtype != array.numpy_dtype:
        raise CheckpointError(
            f"{place}: array {array.path} is {store.dtype.name} {list(store.shape)}, the manifest "
            f"says {array.dtype} {list(array.shape)}; the tree belongs to another model"
        )
    return store


def _damaged(place: Path, array: ArrayRecord, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:200]
    return CheckpointError(
        f"{place}: array {array.path} {UNREADABLE} ({reason}); restore the tree from a copy, or "
        "convert the published folder again"
    )


def _refuse_failed(folder: Path) -> None:
    mark = folder / FAILED_MARK
    if not mark.exists():
        return
    try:
        fault = json.loads(mark.read_text())["fault"]
    except (OSError, ValueError, KeyError, TypeError):
        fault = "the note is unreadable"
    raise CheckpointError(
        f"{folder} did not pass `k26jax verify`: {fault}; convert again, or repair the folder and "
        "run `k26jax verify` until it passes"
    )
