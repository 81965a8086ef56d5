"""A folder under construction: one writer, a journal of what is finished, an atomic end.

`target` appears when everything is in it. Until then the work lies in `target.partial`, whose
journal has one line for what was asked and one for each finished unit; a line is written after its
unit is on disk, so that a unit without a line is redone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k26jax.checkpoint.manifest import sync_folder, write_durably
from k26jax.checkpoint.reader import JOURNAL
from k26jax.errors import CapacityError, CheckpointError

_LOCK = "k26jax_lock"
NOTES = (JOURNAL, _LOCK)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS = tuple(os.strerror(number) for number in _FULL)
# Bytes beside the data: trees' own records, manifest, journal, tokenizer files.
_SPARE_BYTES, _SPARE_SHARE = 32 << 20, 0.002


@dataclass
class Workspace:
    """The folder under construction.

    folder: where to write.
    done: record of each finished unit by name, in the order they were finished.
    """

    target: Path
    folder: Path
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def finish_unit(self, name: str, record: dict[str, Any]) -> None:
        """Notes that a unit is on disk."""
        with open(self.folder / JOURNAL, "ab") as stream:
            stream.write(json.dumps({"unit": name, "record": record}).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.done[name] = record

    def finish(self) -> None:
        """Makes the folder appear as the target; no unit may follow."""
        sync_folder(self.folder)
        os.rename(self.folder, self.target)
        sync_folder(self.target.parent)
        # After the rename: a kill before it must find the journal.
        for name in NOTES:
            (self.target / name).unlink()


def partial_folder(target: Path) -> Path:
    """Returns where the unfinished work for a target lies."""
    return target.with_name(f"{target.name}.partial")


@contextmanager
def open_workspace(
    source: Path, target: Path, request: dict[str, Any], *, resume: bool
) -> Iterator[Workspace]:
    """Gives the folder in which to make `target` from `source`; disk errors become messages.

    Args:
      request: JSON values that fix the result; with other ones unfinished work is not resumed.
      resume: go on with unfinished work if there is any.

    Raises: CheckpointError if the target exists, is being made by another process, cannot be
      written, or has unfinished work that does not fit; CapacityError when the disk is full.
    """
    with disk_errors(target):
        _refuse_target(source, target)
    folder = partial_folder(target)
    with disk_errors(target), _locked(folder, target):
        _refuse_target(source, target)
        yield Workspace(target, folder, _open_journal(folder, target, request, resume))


def require_disk(target: Path, needed_bytes: int) -> None:
    """Checks that the files still to be written fit on the target's disk.

    Raises: CapacityError with what is needed and what there is.
    """
    needed = int(needed_bytes * (1 + _SPARE_SHARE)) + _SPARE_BYTES
    free = free_bytes(target)
    if needed > free:
        raise CapacityError(
            f"{target} needs {needed:,} bytes of disk, {free:,} are free on its file system; free "
            f"{needed - free:,} more or choose another place"
        )


def free_bytes(target: Path) -> int:
    """Returns the bytes that can still be written where a folder is to be."""
    place = target.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turns what the file system refuses into errors that say what to do."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        text, number = " ".join(str(error).split()), getattr(error, "errno", None)
        if number in _FULL or any(words in text for words in _FULL_WORDS):
            raise CapacityError(
                f"the disk of {target} is full ({free_bytes(target):,} bytes are free); free some "
                "and run the same command with --resume: finished layers are kept"
            ) from error
        if isinstance(error, OSError) or "PERMISSION_DENIED" in text:
            raise CheckpointError(
                f"{target} cannot be written ({text[:300]}); check the disk and the permissions, "
                "then run the same command with --resume"
            ) from error
        raise


def _refuse_target(source: Path, target: Path) -> None:
    try:
        str(target.absolute()).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"the path {os.fsencode(target)!r} is not UTF-8, which Orbax needs; give another target"
        ) from None
    # Not Path.resolve, which has a RuntimeError for links that go round.
    here, there = (Path(os.path.realpath(path)) for path in (source, target))
    if there.is_relative_to(here) or here.is_relative_to(there):
        raise CheckpointError(
            f"{target} is the source {source} itself, lies in it or holds it; give another target"
        )
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(f"{target} exists and is no folder; give another target")
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(
            f"{target} exists and is not empty, and nothing is overwritten; remove it or give "
            "another target"
        )


@contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """Holds the folder's lock, which the system drops with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is making {target} right now ({folder} is locked); wait for it "
                "or give another target"
            ) from None
        yield


def _open_journal(
    folder: Path, target: Path, request: dict[str, Any], resume: bool
) -> dict[str, dict[str, Any]]:
    """Returns the finished units, and leaves nothing but them in the folder."""
    path = folder / JOURNAL
    lines = _journal_lines(path)
    if lines and not resume:
        raise CheckpointError(
            f"{folder} holds {len(lines) - 1} finished parts of an earlier run; add --resume to "
            f"go on with it, or remove that folder to start anew"
        )
    if lines:
        _refuse_other_request(lines[0], request, folder)
    done = {line["unit"]: line["record"] for line in lines[1:]}
    done = {name: record for name, record in done.items() if (folder / name).exists()}
    for item in folder.iterdir():
        if item.name not in NOTES and item.name not in done:
            shutil.rmtree(item) if item.is_dir() else item.unlink()
    kept = [request, *({"unit": name, "record": record} for name, record in done.items())]
    write_durably(path, b"".join(json.dumps(line).encode() + b"\n" for line in kept))
    return done


def _journal_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines; the last one may have been cut by the kill."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _refuse_other_request(found: dict[str, Any], request: dict[str, Any], folder: Path) -> None:
    request = json.loads(json.dumps(request))
    # Options first: `--layers` changes the hash of config.json too, and says less there.
    for part in sorted({*found, *request}, key=lambda part: (part != "options", part)):
        before, now = found.get(part), request.get(part)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            key = next(k for k in sorted({*before, *now}) if before.get(k) != now.get(k))
            part, before, now = f"{part} {key}", before.get(key), now.get(key)
        raise CheckpointError(
            f"{folder} was begun with another {part}: {before!r} then, {now!r} now; use what it "
            "was begun with, or remove that folder to start anew"
        )
