"""`verify`: whether a folder holds what it should, to the last bit where it has a manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from k26jax.checkpoint.convert import row_blocks, stored_values
from k26jax.checkpoint.converted import FAILED_MARK, UNREADABLE, open_converted
from k26jax.checkpoint.int4 import GROUP_SIZE, VALUES_PER_WORD
from k26jax.checkpoint.load import plan_load, value_fault
from k26jax.checkpoint.manifest import (
    ArrayRecord,
    Hash,
    TreeRecord,
    read_manifest,
    sha256,
    write_durably,
)
from k26jax.checkpoint.models import declared_model
from k26jax.checkpoint.place import reading_threads
from k26jax.checkpoint.reader import CONVERTED_MARK, Checkpoint, open_checkpoint
from k26jax.checkpoint.workspace import NOTES
from k26jax.errors import K26Error

Progress = Callable[[int], None]

_TOKENIZERS = ("tiktoken.model", "tokenizer.json")
_BLOCK_BYTES = 128 << 20
_MAX_FAULTS = 20
_BITS = ("I32", "I64", "F8_E4M3")  # of which any pattern is a number
_ZERO_CODES = np.int32(np.uint32(0x88888888).astype(np.int32))


@dataclass
class Verification:
    """What `verify` found.

    faults: what makes the folder unfit, the first of each tree and kind first.
    notes: what a user may want to know.
    tensors, read_bytes: how much was looked at.
    """

    folder: str
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tensors: int = 0
    read_bytes: int = 0


def verify(
    folder: Path, against: Path | None = None, *, progress: Progress | None = None
) -> Verification:
    """Returns the faults of a converted or published folder.

    A converted folder is compared with the hashes of its manifest, and with the tensors of
    `against` if that is given; a published one has no hashes, its headers and values are checked.
    A converted folder with a fault gets a mark, by which loading refuses it, until it passes.

    Raises: K26Error if `against` cannot be opened.
    Cost: reads every byte once, of `against` too; host memory for a few tensors.
    """
    found = Verification(str(folder))
    report = progress or (lambda size: None)
    if against is not None:
        # What cannot be opened says nothing about the folder, and must not mark it.
        open_checkpoint(against).close()
    try:
        with reading_threads() as pool:
            if (folder / CONVERTED_MARK).exists():
                _verify_converted(folder, against, found, pool, report)
                _mark(folder, found)
            else:
                _verify_published(folder, found, pool, report)
    except K26Error as error:
        found.faults.append(str(error))
        if (folder / CONVERTED_MARK).exists():
            _mark(folder, found)
    return found


def _verify_converted(
    folder: Path,
    against: Path | None,
    found: Verification,
    pool: ThreadPoolExecutor,
    report: Progress,
) -> None:
    manifest = read_manifest(folder)
    _check_files(folder, manifest.files, found)
    known = {*manifest.files, *(tree.name for tree in manifest.trees)}
    known |= {CONVERTED_MARK, FAILED_MARK, *NOTES}
    extra = sorted(item.name for item in folder.iterdir() if item.name not in known)
    if extra:
        found.notes.append(f"not part of the conversion, not read: {', '.join(extra)}")
    missing = [tree.name for tree in manifest.trees if not (folder / tree.name).is_dir()]
    for name in missing:
        found.faults.append(f"{folder} lacks its tree {name}")
    model = None if found.faults else declared_model(folder)
    layers = model.layers if model else None
    source = open_checkpoint(against, num_hidden_layers=layers) if against else None
    with open_converted(folder, is_trusted=False, without=missing) as checkpoint:
        if model:
            plan_load(checkpoint, model.module)
        for tree in manifest.trees:
            if tree.name not in missing:
                _verify_tree(checkpoint, source, tree, found, pool, report)
    if source is not None:
        source.close()
        _compare_names(source, checkpoint, found)


def _verify_tree(
    checkpoint: Checkpoint,
    source: Checkpoint | None,
    tree: TreeRecord,
    found: Verification,
    pool: ThreadPoolExecutor,
    report: Progress,
) -> None:
    """Adds a tree's faults; the first tensor that differs is named, the others are counted."""
    differing: list[str] = []
    tensors = 0
    for array in tree.arrays:

        def check(index: int, array: ArrayRecord = array) -> list[str]:
            return list(_tensor_faults(checkpoint, source, array, index))

        if array.experts:
            faults = [fault for part in pool.map(check, range(array.shape[0])) for fault in part]
        else:
            faults = check(0)
        differing += faults
        tensors += len(array.tensors)
        report(array.size_bytes)
        found.read_bytes += array.size_bytes
    found.tensors += tensors
    if differing:
        more = f" ({len(differing)} faults in {tree.name}" if len(differing) > 1 else ""
        whole = ": the whole tree" if len(differing) >= tensors else ""
        if whole and UNREADABLE not in differing[0]:
            whole += ", it is another model's"
        found.faults.append(differing[0] + (f"{more}{whole})" if more else ""))


def _tensor_faults(
    checkpoint: Checkpoint, source: Checkpoint | None, array: ArrayRecord, index: int
) -> Iterator[str]:
    name = array.tensors[index]
    ours, theirs, values_fault = Hash(), Hash(), None
    other = _other_tensor(source, name, array.tensor_shape) if source is not None else None
    try:
        for rows in [None] if array.experts or not array.shape else row_blocks(array):
            block = stored_values(checkpoint, array, index, rows)
            ours.update(block)
            values_fault = values_fault or value_fault(name, block)
            if source is not None and not other:
                theirs.update(stored_values(source, array, index, rows))
    except K26Error as error:
        yield str(error)
        return
    if ours.hexdigest() != array.sha256[index]:
        yield (
            f"tensor {name!r} of {checkpoint.folder / checkpoint.entry(name).file.name} does not "
            "have the bytes that were converted; restore that tree or convert again"
        )
    elif other:
        yield other
    elif source is not None and theirs.hexdigest() != ours.hexdigest():
        yield (
            f"tensor {name!r} differs from the one in {source.entry(name).file}; the folder was "
            "converted from another model"
        )
    if values_fault:
        yield values_fault
    if name.endswith(".weight_packed"):
        yield from scale_faults(checkpoint, name)


def _other_tensor(source: Checkpoint, name: str, shape: tuple[int, ...]) -> str | None:
    """Returns why a tensor cannot be compared with the source's; None if it can."""
    if name not in source:
        return f"tensor {name!r} is not in {source.folder}"
    entry = source.entry(name)
    if tuple(entry.shape) != shape:
        return (
            f"tensor {name!r} is {list(shape)} here and {list(entry.shape)} in {entry.file}; the "
            "folder was converted from another model"
        )
    return None


def scale_faults(checkpoint: Checkpoint, packed_name: str) -> Iterator[str]:
    """Yields a fault if a group's scale is zero though its INT4 values are not."""
    scale_name = f"{packed_name.removesuffix('_packed')}_scale"
    if scale_name not in checkpoint:
        return
    zero = checkpoint.copy(scale_name).astype(np.float32) == 0
    if not zero.any():
        return
    words = checkpoint.copy(packed_name)
    groups = words.reshape(*words.shape[:-1], -1, GROUP_SIZE // VALUES_PER_WORD)
    lost = int(np.count_nonzero(zero & (groups != _ZERO_CODES).any(axis=-1)))
    if lost:
        yield f"tensor {scale_name!r} has {lost} scales of zero over values that are not zero"


def _compare_names(source: Checkpoint, checkpoint: Checkpoint, found: Verification) -> None:
    companions = ("_shape", "_scale_inv")
    ours = set(checkpoint.names())
    more = [name for name in source.names() if name not in ours and not name.endswith(companions)]
    if more:
        found.notes.append(f"{len(more)} tensors of {source.folder} are not here, first {more[0]}")


def _check_files(folder: Path, files: dict[str, str], found: Verification) -> None:
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            found.faults.append(f"{path} is missing; copy it from the published folder")
        elif sha256(path.read_bytes()) != expected:
            found.faults.append(f"{path} is not the file that was converted; copy it again")
    if not any(name in files for name in _TOKENIZERS):
        found.notes.append("no tokenizer file came with the model; prompts must be token ids")


def _verify_published(
    folder: Path, found: Verification, pool: ThreadPoolExecutor, report: Progress
) -> None:
    model = declared_model(folder)
    with open_checkpoint(folder, num_hidden_layers=model.layers) as checkpoint:
        for name in checkpoint.ignored_files:
            found.faults.append(
                f"{folder / name} is a weight file that the index does not mention; it is not "
                "read: remove it, or download the index that belongs to it"
            )
        plan_load(checkpoint, model.module)
        for why, count in Counter(checkpoint.skipped.values()).items():
            found.notes.append(f"{count} tensors are not read: {why}")

        def check(name: str) -> tuple[str, list[str]]:
            return name, list(_published_faults(checkpoint, name))

        faults = []
        for name, part in pool.map(check, checkpoint.names()):
            faults += part
            report(checkpoint.entry(name).size_bytes)
            found.read_bytes += checkpoint.entry(name).size_bytes
            found.tensors += 1
        found.faults += faults[:_MAX_FAULTS]
        if len(faults) > _MAX_FAULTS:
            found.faults.append(f"and {len(faults) - _MAX_FAULTS} more such faults")


def _published_faults(checkpoint: Checkpoint, name: str) -> Iterator[str]:
    entry = checkpoint.entry(name)
    length = entry.shape[0] if entry.shape else 1
    rows = max(1, _BLOCK_BYTES * length // max(entry.size_bytes, 1))
    for first in range(0, length, rows) if entry.dtype not in _BITS else ():
        region = (slice(first, first + rows), *[slice(None)] * (len(entry.shape) - 1))
        fault = value_fault(name, checkpoint.copy(name, region))
        if fault:
            yield fault
            return
    if name.endswith(".weight_packed"):
        yield from scale_faults(checkpoint, name)


def _mark(folder: Path, found: Verification) -> None:
    """Leaves or removes the mark by which loading refuses the folder."""
    mark = folder / FAILED_MARK
    try:
        if found.faults:
            write_durably(mark, json.dumps({"fault": found.faults[0]}).encode())
        else:
            mark.unlink(missing_ok=True)
    except OSError as error:
        found.notes.append(f"{mark} cannot be written ({error.strerror})")


def size_to_read(folder: Path) -> int:
    """Returns the bytes that `verify` will report as read; 0 if the folder does not open."""
    try:
        if (folder / CONVERTED_MARK).exists():
            return sum(tree.size_bytes for tree in read_manifest(folder).trees)
        model = declared_model(folder)
        with open_checkpoint(folder, num_hidden_layers=model.layers) as checkpoint:
            return checkpoint.total_bytes()
    except K26Error:
        return 0
