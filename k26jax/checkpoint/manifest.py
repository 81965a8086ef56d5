"""What a converted folder says about itself: its arrays, their hashes, and where they came from.

A converted folder is one Orbax tree a layer, one for what belongs to no layer, the published
configuration and tokenizer files, and this manifest, which is written last. An array is the part
of a declared parameter that one layer owns, in the published layout, experts stacked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from k26jax.checkpoint.index import DTYPES
from k26jax.checkpoint.reader import CONVERTED_MARK
from k26jax.errors import CheckpointError

FORMAT = "k26jax converted checkpoint"
VERSION = 1
OUTSIDE_LAYERS = "outside_layers"


@dataclass(frozen=True)
class ArrayRecord:
    """One array of a tree and the published tensors in it.

    path: parameter path, dots between the parts; the array's name in the tree.
    shape, dtype: as stored, safetensors spelling; the first axis is the experts' if there is one.
    axes: logical axes of `shape`.
    chunk: shape of the pieces that are stored and read as one.
    tensors: canonical names in order of the first axis if `experts`, else one name.
    tensor_shape, tensor_dtype: of one of them in the published files.
    experts: whether the first axis counts tensors.
    shape_dtype: dtype of the `weight_shape` tensors beside INT4 words; None: there were none.
    sha256: of each tensor's stored bytes; empty in a plan.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    chunk: tuple[int, ...]
    tensors: tuple[str, ...]
    tensor_shape: tuple[int, ...]
    tensor_dtype: str
    experts: bool
    shape_dtype: str | None = None
    sha256: tuple[str, ...] = ()

    @property
    def numpy_dtype(self) -> np.dtype:
        """The stored dtype."""
        return DTYPES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Stored bytes."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def is_exact(self) -> bool:
        """Whether the stored bytes are the published ones."""
        return self.dtype == self.tensor_dtype


@dataclass(frozen=True)
class TreeRecord:
    """One Orbax tree: a layer's arrays, or those outside all layers."""

    name: str
    arrays: tuple[ArrayRecord, ...]

    @property
    def size_bytes(self) -> int:
        """Stored bytes of its arrays."""
        return sum(array.size_bytes for array in self.arrays)


@dataclass(frozen=True)
class Manifest:
    """The content of a converted folder.

    options: what the conversion was asked for.
    source: fingerprint of each published weight file by name.
    prefix: in front of the canonical names in the published files.
    files: SHA-256 of each file copied beside the trees.
    """

    options: dict[str, Any]
    source: dict[str, str]
    prefix: str
    files: dict[str, str]
    trees: tuple[TreeRecord, ...] = field(default=())

    def arrays(self) -> Iterator[tuple[TreeRecord, ArrayRecord]]:
        """Yields every array with its tree."""
        for tree in self.trees:
            for array in tree.arrays:
                yield tree, array


def layer_name(layer: int) -> str:
    """Returns the name of a layer's tree."""
    return f"layer_{layer:05}"


def sha256(data: np.ndarray | bytes) -> str:
    """Returns the SHA-256 of bytes, or of an array's bytes in row-major order."""
    return Hash().update(data).hexdigest()


class Hash:
    """A SHA-256 that takes arrays."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: np.ndarray | bytes) -> Hash:
        """Returns itself with more bytes taken in."""
        if isinstance(data, np.ndarray):
            # hashlib does not know bfloat16.
            self._hash.update(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        else:
            self._hash.update(data)
        return self

    def hexdigest(self) -> str:
        """Returns the hash of what came so far."""
        return self._hash.hexdigest()


def tree_to_json(tree: TreeRecord) -> dict[str, Any]:
    """Returns a tree's record as JSON values."""
    return dataclasses.asdict(tree)


def tree_from_json(value: dict[str, Any]) -> TreeRecord:
    """Returns the record that `tree_to_json` gave.

    Raises: KeyError or TypeError if it is another thing.
    """
    arrays = []
    for item in value["arrays"]:
        item: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
        arrays.append(ArrayRecord(**item))
    return TreeRecord(value["name"], tuple(arrays))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest so that it is there whole or not at all, also after a power cut."""
    value = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    write_durably(folder / CONVERTED_MARK, json.dumps(value, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a converted folder.

    Raises: CheckpointError if it is missing, damaged or of another version.
    """
    path = folder / CONVERTED_MARK
    fix = "restore it from a copy, or convert the published folder again"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if (value["format"], value["version"]) != (FORMAT, VERSION):
            raise CheckpointError(
                f"{path} is {value['format']!r} version {value['version']!r}, this release reads "
                f"{FORMAT!r} version {VERSION}; convert the published folder again"
            )
        trees = tuple(tree_from_json(tree) for tree in value.pop("trees"))
        names = {item.name for item in dataclasses.fields(Manifest)} - {"trees"}
        return Manifest(**{name: value[name] for name in names}, trees=trees)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {fix}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); {fix}") from error


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file by way of a temporary one, on disk before the name is."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts a folder's list of names on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
