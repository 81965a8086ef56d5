"""Whether what an engine is about to take fits in the memory there is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from k26jax.errors import CapacityError

_KIB = 1024


def tree_bytes(tree: Any) -> int:
    """Returns the bytes that a device holds of a tree's arrays, or of those its shapes stand for.

    Shapes without a place are taken to be whole.
    """

    def size(leaf: Any) -> int:
        place = getattr(leaf, "sharding", None)
        return math.prod(leaf.shape if place is None else place.shard_shape(leaf.shape))

    return sum(size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def require_memory(
    needs: Mapping[str, int],
    *,
    slots: int,
    context_length: int,
    devices: Sequence[Any] | None = None,
) -> None:
    """Checks that memory can be had before it is taken: a system that is short of it kills.

    Args:
      needs: bytes on each device by what they are for; "weights" are what no option of requests
        makes smaller.
      slots, context_length: the options in force, which the message names.
      devices: those of this process that share the model; default: the first alone.

    Raises: CapacityError with what is needed and what there is.
    """
    devices = devices or jax.local_devices()[:1]
    available = available_bytes(devices)
    if available is None or sum(needs.values()) <= available:
        return
    parts = ", ".join(f"{what} {_gigabytes(size)}" for what, size in needs.items())
    each = f" on each of {len(devices)} devices" if len(devices) > 1 else ""
    pages = ", --prefix-cache-tokens" if "prefix cache" in needs else ""
    fix = (
        f"lower --max-running-requests (now {slots}){pages} or --context-length (now "
        f"{context_length})"
        if needs.get("weights", 0) < available
        else f"the weights alone do not fit; use a machine with more memory{_more(devices)}"
    )
    raise CapacityError(
        f"{_gigabytes(sum(needs.values()))} of memory are needed{each} ({parts}), but "
        f"{_gigabytes(available)} are available; {fix}"
    )


def _more(devices: Sequence[Any]) -> str:
    there = jax.device_count()
    if devices[0].platform == "cpu" or there <= len(devices):
        return ""
    return f", or share them among the {there} devices there are (--tp-size)"


def available_bytes(devices: Sequence[Any] | None = None) -> int | None:
    """Returns the bytes that arrays can still take on the fullest device; None if none says.

    Devices of a CPU share the host's memory: each gets an equal part.

    Args:
      devices: default: the first.
    """
    devices = devices or jax.local_devices()[:1]
    if devices[0].platform == "cpu":
        host = host_available_bytes()
        return None if host is None else host // len(devices)
    free = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return min(free, default=None)


def host_available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process can still take; None where Linux does not say.

    The least of what the system has available and what each control group (version 2) around
    the process leaves it; file pages that a group can drop count as left.
    """
    found = [_system_bytes(root / "proc/meminfo")]
    groups = root / "sys/fs/cgroup"
    folder = groups / _own_group(root / "proc/self/cgroup")
    while True:
        found.append(_group_bytes(folder))
        if folder == groups:
            break
        folder = folder.parent
    return min((size for size in found if size is not None), default=None)


def _system_bytes(meminfo: Path) -> int | None:
    size = _fields(meminfo).get("MemAvailable:")
    return None if size is None else size * _KIB


def _own_group(path: Path) -> str:
    """Returns the process's version 2 group, relative to the root of groups; "" without one."""
    lines = _read(path).splitlines()
    own = next((line for line in lines if line.startswith("0::/")), "")
    name = own.removeprefix("0::/")
    # A process that was moved between name spaces sees a path that leads out of its own.
    return "" if ".." in name.split("/") else name


def _group_bytes(folder: Path) -> int | None:
    limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    stat = _fields(folder / "memory.stat")
    droppable = stat.get("active_file", 0) + stat.get("inactive_file", 0)
    return max(int(limit) - int(used) + droppable, 0)


def _fields(path: Path) -> dict[str, int]:
    """Returns the numbers of a file whose lines begin with a name and a number."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e7 else f"{size / 1e6:.2g} MB"
