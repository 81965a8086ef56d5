"""Writes safetensors shards in the layout of the published Kimi files, tensor by tensor.

One layer is one shard, the last shard holds what belongs to no layer. Within a shard wide elements
come first, then names in order; the header is compact JSON padded to eight bytes, as the
safetensors library writes it. Must not know where values come from.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k26jax.checkpoint.index import DTYPES, INDEX_NAME
from k26jax.checkpoint.manifest import sync_folder, write_durably

# The library's order of dtypes, widest first.
_ORDER = (
    "U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16",
    "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL",
)  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name in the file, dtype (safetensors spelling) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """One file: its name and its tensors in the order of their bytes."""

    name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def header(self) -> bytes:
        """The header as written, its length in front."""
        described, begin = {}, 0
        for tensor in self.tensors:
            end = begin + tensor.size_bytes
            described[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(tensor.size_bytes for tensor in self.tensors)


def plan_shards(groups: Sequence[Iterable[TensorSpec]]) -> list[Shard]:
    """Returns one shard a group, named and ordered as published."""
    shards = []
    for number, group in enumerate(groups, 1):
        name = (
            "model.safetensors"
            if len(groups) == 1
            else f"model-{number:05}-of-{len(groups):06}.safetensors"
        )
        ordered = sorted(group, key=lambda tensor: (_ORDER.index(tensor.dtype), tensor.name))
        shards.append(Shard(name, tuple(ordered)))
    return shards


def write_shard(
    folder: Path, shard: Shard, values: Callable[[TensorSpec], Iterator[np.ndarray]]
) -> None:
    """Writes one file, which appears when it is whole.

    Args:
      values: gives a tensor's values in pieces, in row-major order.
    """
    temporary = folder / f".{shard.name}.tmp"
    with open(temporary, "wb") as stream:
        stream.write(shard.header)
        for tensor in shard.tensors:
            end = stream.tell() + tensor.size_bytes
            for piece in values(tensor):
                stream.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            assert stream.tell() == end, tensor.name
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, folder / shard.name)
    sync_folder(folder)


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Writes the index of more than one shard."""
    if len(shards) == 1:
        return
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(tensor.size_bytes for tensor in tensors)},
        "weight_map": {tensor.name: shard.name for shard in shards for tensor in shard.tensors},
    }
    write_durably(folder / INDEX_NAME, json.dumps(index, indent=2).encode())
