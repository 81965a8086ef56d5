"""`convert --to-hf`: a converted folder becomes published safetensors again, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k26jax.checkpoint.convert import row_blocks, stored_values
from k26jax.checkpoint.manifest import (
    ArrayRecord,
    Hash,
    Manifest,
    read_manifest,
    write_durably,
)
from k26jax.checkpoint.published import Shard, TensorSpec, plan_shards, write_index, write_shard
from k26jax.checkpoint.reader import CONVERTED_MARK, Checkpoint, open_checkpoint
from k26jax.checkpoint.workspace import open_workspace, require_disk
from k26jax.errors import CheckpointError

_INT4_IN_A_WORD = 8
_DEQUANTIZED = "F8_E4M3"


@dataclass(frozen=True)
class Export:
    """A planned export; nothing is written yet.

    places: array and index of each tensor by its name in the files; `weight_shape` ones are absent.
    shapes: values of the `weight_shape` tensors by name.
    changed: arrays that do not hold the published bits, by path.
    """

    source: Path
    target: Path
    checkpoint: Checkpoint
    manifest: Manifest
    shards: list[Shard]
    places: dict[str, tuple[ArrayRecord, int]]
    shapes: dict[str, np.ndarray]
    changed: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.file_bytes for shard in self.shards)


def plan_export(source: Path, target: Path) -> Export:
    """Returns what `export` would do.

    Raises: CheckpointError if the source is no converted folder.
    """
    if not (source / CONVERTED_MARK).exists():
        raise CheckpointError(
            f"{source} is no converted folder (it has no {CONVERTED_MARK}); --to-hf goes from one "
            "that `k26jax convert` made"
        )
    checkpoint, manifest = open_checkpoint(source), read_manifest(source)
    places: dict[str, tuple[ArrayRecord, int]] = {}
    shapes: dict[str, np.ndarray] = {}
    groups: list[list[TensorSpec]] = []
    for tree in manifest.trees:
        group: list[TensorSpec] = []
        for array in tree.arrays:
            for index, tensor in enumerate(array.tensors):
                name = manifest.prefix + tensor
                places[name] = array, index
                group.append(TensorSpec(name, array.dtype, array.tensor_shape))
                if array.shape_dtype:
                    companion = f"{name.removesuffix('_packed')}_shape"
                    group.append(TensorSpec(companion, array.shape_dtype, (2,)))
                    *rows, words = array.tensor_shape
                    shapes[companion] = np.array([*rows, _INT4_IN_A_WORD * words])
        groups.append(group)
    changed = dict.fromkeys(a.path for _, a in manifest.arrays() if not a.is_exact)
    shards = plan_shards([group for group in groups if group])
    return Export(source, target, checkpoint, manifest, shards, places, shapes, tuple(changed))


def export(
    plan: Export,
    *,
    resume: bool = False,
    progress: Callable[[int], None] | None = None,
    on_kept: Callable[[int], None] = lambda size: None,
) -> None:
    """Writes the published folder; it appears when it is whole.

    Args:
      progress: called with bytes as they are written.
      on_kept: called with the bytes that an earlier run has written.

    Raises: CheckpointError or CapacityError; CheckpointError too if a tensor's bytes are not those
      of the manifest.
    Cost: host memory for one block of a tensor.
    """
    report = progress or (lambda size: None)
    request = {"export": plan.manifest.files | plan.manifest.source | plan.manifest.options}
    with open_workspace(plan.source, plan.target, request, resume=resume) as space:
        left = [shard for shard in plan.shards if shard.name not in space.done]
        require_disk(plan.target, sum(shard.file_bytes for shard in left))
        on_kept(plan.total_bytes - sum(shard.file_bytes for shard in left))
        for shard in left:
            write_shard(space.folder, shard, lambda tensor: _values(plan, tensor, report))
            report(len(shard.header))
            space.finish_unit(shard.name, {})
        write_index(space.folder, plan.shards)
        for name in plan.manifest.files:
            content = (plan.source / name).read_bytes()
            if name == "config.json":
                content = _config(plan, content)
            write_durably(space.folder / name, content)
        space.finish()


def _values(
    plan: Export, tensor: TensorSpec, report: Callable[[int], None]
) -> Iterator[np.ndarray]:
    if tensor.name in plan.shapes:
        yield plan.shapes[tensor.name].astype({"I32": np.int32, "I64": np.int64}[tensor.dtype])
        report(tensor.size_bytes)
        return
    array, index = plan.places[tensor.name]
    found = Hash()
    for rows in [None] if array.experts or not array.shape else row_blocks(array):
        block = stored_values(plan.checkpoint, array, index, rows)
        found.update(block)
        yield block
        report(block.nbytes)
    if found.hexdigest() != array.sha256[index]:
        raise CheckpointError(
            f"{plan.source}: tensor {tensor.name!r} does not have the bytes that were converted; "
            "run `k26jax verify` on the folder, then restore it or convert again"
        )


def _config(plan: Export, content: bytes) -> bytes:
    """Returns config.json, without the quantization of weights that are stored dequantized."""
    if not any(array.tensor_dtype == _DEQUANTIZED for _, array in plan.manifest.arrays()):
        return content
    data = json.loads(content)
    for part in (data, data.get("text_config") or {}):
        part.pop("quantization_config", None)
    return json.dumps(data, indent=2).encode()
