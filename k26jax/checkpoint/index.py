"""Parses safetensors headers and the shard index, and cross-checks every number in them.

Reads no tensor data and must not know what a tensor's name means.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from k26jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 64  # numpy's limit
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: its bytes are `begin` to `end` (exclusive) of `file`, row-major.

    name: as in the file.
    dtype: as in the file, a key of `DTYPES`.
    begin, end: bytes from the start of the file, not from the end of its header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class ShardList:
    """The files that make up a checkpoint.

    files: in the order of their names; all exist when the folder has an index.
    weight_map: tensor name to file name as the index says, None without an index.
    ignored: names of further *.safetensors files, which the index does not mention.
    """

    files: tuple[Path, ...]
    weight_map: dict[str, str] | None
    ignored: tuple[str, ...]


def read_index(folder: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """Returns every tensor of a checkpoint folder by its name in the files.

    Returns: in file order, so that reading one after the other never goes back.
    Raises: CheckpointError for the first thing that does not fit, see `list_shards`,
        `read_header` and `read_entries`.
    Cost: reads the headers (about 35 MB for Kimi K2.6), no tensor data.
    """
    return read_entries(list_shards(folder))


def list_shards(folder: str | os.PathLike[str]) -> ShardList:
    """Returns the files of a checkpoint: those of the index, or else the only one there is.

    Raises: CheckpointError if the folder, the index or a shard is missing or damaged, or if it
        takes a guess to say which files belong together.
    """
    folder = Path(folder)
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"checkpoint folder {folder} {problem}; give the folder that holds the "
            "*.safetensors files"
        )
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(
            f"checkpoint folder {folder} cannot be listed ({error.strerror}); check its permissions"
        ) from error
    # Names with a leading dot are other programs' notes (macOS writes ._model.safetensors).
    present = [name for name in names if name.endswith(".safetensors") and name[0] != "."]
    if INDEX_NAME not in names:
        return ShardList((folder / _only_file(folder, names, present),), None, ())
    weight_map = _read_weight_map(folder / INDEX_NAME)
    used = sorted(set(weight_map.values()))
    missing = [name for name in used if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(used)} files that {INDEX_NAME} names "
            f"(missing, or no regular files): {_first(missing)}; download them"
        )
    ignored = tuple(name for name in present if name not in used)
    return ShardList(tuple(folder / name for name in used), weight_map, ignored)


def read_entries(shards: ShardList) -> dict[str, TensorEntry]:
    """Returns the tensors of all shards, after checking headers against the index.

    Raises: CheckpointError if a tensor is in two files, is in another file than the index says,
        or is known to only one of header and index.
    """
    entries: dict[str, TensorEntry] = {}
    for file in shards.files:
        for entry in read_header(file):
            if entry.name in entries:
                raise CheckpointError(
                    f"tensor {entry.name!r} is in two files, {entries[entry.name].file} and "
                    f"{file}; expected it once: download both again"
                )
            entries[entry.name] = entry
    if not entries:
        raise CheckpointError(
            f"{shards.files[0]} holds no tensors; download {shards.files[0].name} again"
        )
    if shards.weight_map is not None:
        _check_weight_map(shards.files[0].with_name(INDEX_NAME), shards.weight_map, entries)
    return entries


def read_header(path: Path) -> list[TensorEntry]:
    """Returns the tensors of one safetensors file in the order of their bytes.

    Raises: CheckpointError unless the header is well formed and its tensors fill the file
        exactly, without overlap or gap.
    """
    header, data_begin, file_bytes = _load_header(path)
    header.pop("__metadata__", None)
    entries = [_make_entry(path, name, value, data_begin) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_extent(path, entries, data_begin, file_bytes)
    return entries


def _only_file(folder: Path, names: list[str], present: list[str]) -> str:
    if not present:
        pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
        hint = (
            f"; it has pickle files ({_first(pickles)}), which are never read because "
            "opening one runs the code inside it"
            if pickles
            else ""
        )
        raise CheckpointError(
            f"no *.safetensors file in {folder}{hint}; download the safetensors version of "
            "the model"
        )
    part = re.search(r"-of-0*([0-9]+)\.safetensors$", present[0])
    if len(present) > 1:
        problem = f"{len(present)} *.safetensors files ({_first(present)})"
    elif part and part[1] != "1":
        problem = f"only {present[0]}, one of {part[1]} files,"
    else:
        return present[0]
    raise CheckpointError(
        f"{folder} has {problem} and no {INDEX_NAME} to say which files make up the model; "
        "download the index and the files it names"
    )


def _read_weight_map(path: Path) -> dict[str, str]:
    fix = f"download {path.name} again"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {fix}") from error
    _refuse_pointer(path, raw)
    weight_map = _parse_object(raw, str(path), fix).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: weight_map must be an object of tensor names and file names, found "
            f"{'an empty one' if weight_map == {} else type(weight_map).__name__}; {fix}"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            problem = "a file name must be a string"
        elif name != os.path.basename(name) or "\\" in name or "\0" in name:
            problem = "a shard must lie in the checkpoint folder itself, without a path"
        elif not name.endswith(".safetensors"):
            problem = "only *.safetensors files are read"
        else:
            continue
        raise CheckpointError(f"{path} puts tensor {tensor!r} in {name!r}: {problem}; {fix}")
    return weight_map


def _check_weight_map(
    index: Path, weight_map: dict[str, str], entries: dict[str, TensorEntry]
) -> None:
    """Raises CheckpointError unless index and headers place the same tensors in the same files."""
    lost = [name for name in weight_map if name not in entries]
    if lost:
        file = weight_map[lost[0]]
        raise CheckpointError(
            f"{index} puts tensor {lost[0]!r} in {file}, whose header does not have it "
            f"({len(lost)} such tensors); download {file} and the index again"
        )
    for name, entry in entries.items():
        if weight_map.get(name) == entry.file.name:
            continue
        said = f"puts it in {weight_map[name]}" if name in weight_map else "does not list it"
        raise CheckpointError(
            f"tensor {name!r} is in {entry.file}, but {index} {said}; download "
            f"{entry.file.name} and the index again"
        )


def _load_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Returns the header as parsed, the offset of the first data byte, and the file's size."""
    fix = f"download {path.name} again"
    if not path.is_file():  # also keeps a named pipe from blocking for ever
        raise CheckpointError(f"{path} is missing, a broken link or no regular file; {fix}")
    try:
        with open(path, "rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            _refuse_pointer(path, prefix)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{path} is truncated: it has {file_bytes} bytes, too few even for the 8 "
                    f"bytes of the header's length; {fix}"
                )
            length = int.from_bytes(prefix, "little")
            if length > file_bytes - 8:
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: its header claims {length} "
                    f"bytes, {file_bytes - 8} follow; {fix}"
                )
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: its header claims {length} bytes, expected 2 to "
                    f"{MAX_HEADER_BYTES}; {fix}"
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {fix}") from error
    return _parse_object(raw, f"{path}: the header", fix), 8 + length, file_bytes


def _make_entry(path: Path, name: str, value: Any, data_begin: int) -> TensorEntry:
    def damaged(problem: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r} {problem}; download {path.name} again")

    if not isinstance(value, dict):
        raise damaged(f"is described by {type(value).__name__}, expected an object")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in value:
            raise damaged(f"has no {key}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise damaged(
            f"has dtype {dtype!r}, but only {', '.join(DTYPES)} are read "
            "(a sound file needs a release in one of these)"
        )
    if not _is_natural_list(shape) or len(shape) > MAX_DIMENSIONS:
        raise damaged(
            f"has shape {str(shape)[:80]}, expected at most {MAX_DIMENSIONS} integers >= 0"
        )
    if not _is_natural_list(offsets) or len(offsets) != 2:
        raise damaged(f"has data_offsets {str(offsets)[:80]}, expected two integers >= 0")
    begin, end = offsets
    if begin > end:
        raise damaged(f"has data_offsets {offsets}, which end before they begin")
    itemsize = DTYPES[dtype].itemsize
    expected = math.prod(shape) * itemsize
    if end - begin != expected:
        raise damaged(
            f"has {end - begin} bytes by its data_offsets, but {dtype} {shape} takes {expected}"
        )
    if math.prod(max(size, 1) for size in shape) * itemsize >= 2**63:
        raise damaged(f"has shape {shape}, which no array can have")
    return TensorEntry(name, dtype, tuple(shape), path, data_begin + begin, data_begin + end)


def _check_extent(path: Path, entries: list[TensorEntry], data_begin: int, file_bytes: int) -> None:
    """Raises CheckpointError unless the sorted tensors fill the rest of the file exactly."""
    fix = f"download {path.name} again"
    last = max(entries, key=lambda entry: entry.end, default=None)
    if last is not None and last.end > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: it has {file_bytes} bytes, expected {last.end}, where tensor "
            f"{last.name!r} ends; {fix}"
        )
    position, before = data_begin, "the header"
    for entry in entries:
        if entry.begin != position:
            problem = "overlaps" if entry.begin < position else "leaves a hole after"
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} {problem} {before}: it begins at byte "
                f"{entry.begin}, expected {position}; {fix}"
            )
        position, before = entry.end, f"tensor {entry.name!r}"
    if position != file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, but {before} ends at byte {position} and nothing "
            f"may follow; {fix}"
        )


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start.startswith(b"version "):
        raise CheckpointError(
            f"{path} is a git-LFS pointer, not the file itself; run `git lfs pull` in its folder"
        )


def _parse_object(raw: bytes, what: str, fix: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object_of_unique_keys)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what} is not UTF-8 text at byte {error.start}; {fix}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON ({error}); {fix}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is JSON {type(value).__name__}, expected an object; {fix}")
    return value


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {repeated!r} appears twice")
    return value


def _is_natural_list(value: Any) -> bool:
    # bool is a subclass of int, but true is no number in a header.
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _first(names: Iterable[str], count: int = 5) -> str:
    names = list(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
