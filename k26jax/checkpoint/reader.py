"""Opens a checkpoint folder and hands out its tensors by canonical name, mapped lazily.

Must not know how tensors become parameters, nor decode quantized weights.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np

from k26jax.checkpoint.index import DTYPES, TensorEntry, list_shards, read_entries
from k26jax.errors import CheckpointError, nearest

PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_INV_FREQ = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
_MAX_CANDIDATES = 5000  # comparing with all 208,215 names of Kimi K2.6 takes 20 seconds


def open_checkpoint(
    folder: str | os.PathLike[str], *, num_hidden_layers: int | None = None
) -> Checkpoint:
    """Returns a folder's text-model tensors under canonical names, checked but not yet read.

    Args:
        num_hidden_layers: layers from this one on (the multi-token-prediction layers of some
            releases) are skipped; None keeps all.
    Raises: CheckpointError if files are damaged or missing, see `index.read_index`, or if two
        tensors have one canonical name.
    Cost: reads the headers only.
    """
    folder = Path(folder)
    shards = list_shards(folder)
    originals = read_entries(shards)
    entries: dict[str, TensorEntry] = {}
    skipped: dict[str, str] = {}
    for original, entry in originals.items():
        name = original.removeprefix(PREFIX)
        reason = _reason_to_skip(name, num_hidden_layers)
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
                raise CheckpointError(f"checkpoint {self.folder} is closed; open it again")
            try:
                found = os.stat(file).st_size
                # Touching a mapped page beyond the end of a shortened file kills the process.
                if found != self._file_bytes[file]:
                    raise CheckpointError(
                        f"{file} had {self._file_bytes[file]} bytes when the checkpoint was "
                        f"opened and has {found} now; leave the files alone and open it again"
                    )
                if file not in self._maps:
                    self._maps[file] = np.memmap(file, dtype=np.uint8, mode="r")
            except OSError as error:
                raise CheckpointError(
                    f"{file} cannot be read any more ({error.strerror}); restore it and open the "
                    "checkpoint again"
                ) from error
            return self._maps[file]


def _reason_to_skip(name: str, num_hidden_layers: int | None) -> str | None:
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
