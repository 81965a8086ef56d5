"""Opens a checkpoint folder and hands out its tensors by canonical name, mapped or copied.

Must not know how tensors become parameters, nor decode quantized weights.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from k26jax.checkpoint.index import DTYPES, TensorEntry, list_shards, read_entries
from k26jax.errors import CheckpointError, nearest

PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_INV_FREQ = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
CONVERTED_MARK = "k26jax_manifest.json"  # its presence makes a folder a converted one
JOURNAL = "k26jax_journal.jsonl"  # and this one, one that is not finished
_MAX_CANDIDATES = 5000  # comparing with all 208,215 names of Kimi K2.6 takes 20 seconds


def open_checkpoint(
    folder: str | os.PathLike[str], *, num_hidden_layers: int | None = None
) -> Checkpoint:
    """Returns a folder's text-model tensors under canonical names, checked but not yet read.

    The folder is a published one or one that `k26jax convert` made.

    Args:
        num_hidden_layers: layers from this one on (the multi-token-prediction layers of some
            releases) are skipped; None keeps all.
    Raises: CheckpointError if files are damaged or missing, see `index.read_index`, or if two
        tensors have one canonical name.
    Cost: reads the headers only.
    """
    folder = Path(folder)
    if (folder / CONVERTED_MARK).exists():
        from k26jax.checkpoint.converted import open_converted

        return open_converted(folder, num_hidden_layers=num_hidden_layers)
    if (folder / JOURNAL).exists():
        raise CheckpointError(
            f"{folder} is an unfinished conversion; finish it with `k26jax convert SOURCE TARGET "
            "--resume`"
        )
    shards = list_shards(folder)
    originals = read_entries(shards)
    entries: dict[str, TensorEntry] = {}
    skipped: dict[str, str] = {}
    for original, entry in originals.items():
        name = original.removeprefix(PREFIX)
        reason = reason_to_skip(name, num_hidden_layers)
        if reason:
            skipped[original] = reason
        elif name in entries:
            raise CheckpointError(
                f"tensors {entries[name].name!r} ({entries[name].file}) and {original!r} "
                f"({entry.file}) are both {name!r}; expected names either all with the prefix "
                f"{PREFIX!r} or all without it"
            )
        else:
            entries[name] = entry
    # A header that passed its checks describes its file to the last byte.
    file_bytes: dict[Path, int] = {}
    for entry in originals.values():
        file_bytes[entry.file] = max(entry.end, file_bytes.get(entry.file, 0))
    return Checkpoint(folder, entries, skipped, shards.ignored, file_bytes)


class Checkpoint:
    """The tensors of an opened checkpoint; a file is mapped when one of its tensors is read.

    folder: as given.
    entries: canonical name (without `language_model.`) to place, in file order.
    skipped: name in the file to the reason why the text model has no use for the tensor.
    ignored_files: *.safetensors files in the folder that its index does not mention.
    """

    def __init__(
        self,
        folder: Path,
        entries: dict[str, TensorEntry],
        skipped: dict[str, str],
        ignored_files: tuple[str, ...],
        file_bytes: dict[Path, int],
    ) -> None:
        self.folder = folder
        self.entries = entries
        self.skipped = skipped
        self.ignored_files = ignored_files
        self._file_bytes = file_bytes
        self._maps: dict[Path, np.memmap] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def names(self) -> list[str]:
        """Returns all canonical names, in file order."""
        return list(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def entry(self, name: str) -> TensorEntry:
        """Returns the place of a tensor.

        Raises: CheckpointError if there is none of this name.
        """
        if name not in self.entries:
            reason = self.skipped.get(name) or self.skipped.get(PREFIX + name)
            hint = f"; it is skipped: {reason}" if reason else _nearest_name(name, self.entries)
            raise CheckpointError(f"checkpoint {self.folder} has no tensor {name!r}{hint}")
        return self.entries[name]

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as a read-only view of its file, without copying.

        Returns: shape and dtype of the file (BF16 and FP8 as ml_dtypes), possibly unaligned. The
            view stays valid after `close`.
        Raises: CheckpointError if there is no such tensor, the checkpoint is closed, or the file
            has changed its size since it was opened.
        Cost: address space for the whole file; memory pages only as the view is used.
        """
        entry = self.entry(name)
        raw = self._map(entry.file)[entry.begin : entry.end]
        return raw.view(np.ndarray).view(DTYPES[entry.dtype]).reshape(entry.shape)

    def copy(
        self,
        name: str,
        region: Sequence[slice] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """Returns a new array with a tensor's region, read from its file without mapping it.

        Args:
            region: one slice of step 1 an axis of `shape`; None: all of it.
            shape: to see the tensor in, row-major; default: its own.
        Raises: CheckpointError as `read`, or if the file ends too early.
        Cost: reads the rows from the region's first to its last, and a copy if it has gaps.
        """
        entry = self.entry(name)
        if self._is_closed:
            raise self._closed()
        shape = entry.shape if shape is None else shape
        if not shape or not entry.size_bytes:
            rows, inner, begin, length = (), (), entry.begin, entry.size_bytes
        else:
            region = region or [slice(None)] * len(shape)
            first, last, _ = region[0].indices(shape[0])
            row_bytes = entry.size_bytes // shape[0]
            rows, inner = (slice(None),), tuple(region[1:])
            begin, length = entry.begin + first * row_bytes, (last - first) * row_bytes
            shape = (last - first, *shape[1:])
        raw = np.empty(length, np.uint8)
        _read_exactly(entry.file, self._file_bytes[entry.file], raw, begin)
        part = raw.view(DTYPES[entry.dtype]).reshape(shape)[rows + inner]
        return part if part.flags.c_contiguous else part.copy()

    def total_bytes(self) -> int:
        """Returns the bytes of all tensors in `entries`, as stored."""
        return sum(entry.size_bytes for entry in self.entries.values())

    def close(self) -> None:
        """Forgets the mapped files; a file is unmapped when the last view of it is gone."""
        with self._lock:
            self._is_closed = True
            self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _map(self, file: Path) -> np.memmap:
        with self._lock:
            if self._is_closed:
                raise self._closed()
            try:
                # Touching a mapped page beyond the end of a shortened file kills the process.
                _refuse_other_size(file, self._file_bytes[file], os.stat(file).st_size)
                if file not in self._maps:
                    self._maps[file] = np.memmap(file, dtype=np.uint8, mode="r")
            except OSError as error:
                raise _unreadable(file, error) from error
            return self._maps[file]

    def _closed(self) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.folder} is closed; open it again")


def _read_exactly(file: Path, file_bytes: int, out: np.ndarray, begin: int) -> None:
    """Fills `out` with the bytes of a file from `begin` on."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            _refuse_other_size(file, file_bytes, os.fstat(descriptor).st_size)
            done = 0
            while done < out.nbytes:
                count = os.preadv(descriptor, [out[done:].data], begin + done)
                if not count:
                    _refuse_other_size(file, file_bytes, begin + done)
                done += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(file, error) from error


def _refuse_other_size(file: Path, expected: int, found: int) -> None:
    if found != expected:
        raise CheckpointError(
            f"{file} had {expected} bytes when the checkpoint was opened and has {found} now; "
            "leave the files alone and open it again"
        )


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read any more ({error.strerror}); restore it and open the checkpoint "
        "again"
    )


def reason_to_skip(name: str, num_hidden_layers: int | None) -> str | None:
    """Returns why the text model has no use for a tensor, or None."""
    if name.startswith(VISION_PREFIXES):
        return "vision tensor, the text model does not use it"
    if _INV_FREQ.fullmatch(name):
        return "rotary frequencies, computed from the configuration"
    layer = _LAYER.match(name)
    if layer and num_hidden_layers is not None and int(layer[1]) >= num_hidden_layers:
        return f"layer {int(layer[1])} of a model of {num_hidden_layers} layers"
    return None


def _nearest_name(name: str, known: dict[str, TensorEntry]) -> str:
    """Returns the hint of `errors.nearest`, looking first where the leading parts agree."""
    prefix = name
    while prefix:
        prefix = prefix[:-1].rpartition(".")[0]
        prefix += "." if prefix else ""
        candidates = [other for other in known if other.startswith(prefix)][:_MAX_CANDIDATES]
        hint = nearest(name, candidates)
        if hint:
            return hint
    return ""
