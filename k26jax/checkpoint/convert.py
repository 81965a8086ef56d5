"""`convert`: a published folder becomes one Orbax tree a layer, streamed, resumable, hashed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from k26jax.checkpoint.index import INDEX_NAME
from k26jax.checkpoint.layout import cuts, plan_trees
from k26jax.checkpoint.load import plan_load, read_as
from k26jax.checkpoint.manifest import (
    VERSION,
    ArrayRecord,
    Hash,
    Manifest,
    TreeRecord,
    read_manifest,
    sha256,
    tree_from_json,
    tree_to_json,
    write_durably,
    write_manifest,
)
from k26jax.checkpoint.models import (
    DeclaredModel,
    declared,
    declared_model,
    is_drafter,
    with_layers,
)
from k26jax.checkpoint.place import reading_threads
from k26jax.checkpoint.reader import CONVERTED_MARK, PREFIX, Checkpoint, open_checkpoint
from k26jax.checkpoint.trees import Streamed, save_tree
from k26jax.checkpoint.workspace import open_workspace, require_disk
from k26jax.config import ModelConfig, read_json
from k26jax.errors import CheckpointError, ConfigError
from k26jax.model.parameters import nest

Progress = Callable[[int], None]

BLOCK_BYTES = 128 << 20  # read, hashed and written as one; two are in memory
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MAX_COPIED_BYTES = 256 << 20
_COPIED_SUFFIXES = {"", ".jinja", ".json", ".md", ".model", ".py", ".tiktoken", ".txt"}


@dataclass(frozen=True)
class ConvertOptions:
    """What a conversion may be asked for.

    dtype: of float weights, "auto" for the published one of each.
    layers: how many to keep, from the first; None: all.
    tp_size, ep_size: ranks of the mesh on whose borders stored pieces end; any mesh loads any.
    """

    dtype: str = "auto"
    layers: int | None = None
    tp_size: int = 1
    ep_size: int = 1


@dataclass(frozen=True)
class Conversion:
    """A planned conversion; nothing is written yet.

    manifest: without hashes.
    copied: files to be copied, by name.
    """

    source: Path
    target: Path
    checkpoint: Checkpoint
    manifest: Manifest
    copied: dict[str, bytes | Path]

    @property
    def total_bytes(self) -> int:
        """Bytes of all trees."""
        return sum(tree.size_bytes for tree in self.manifest.trees)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest tree: the unit of the memory bound."""
        return max(tree.size_bytes for tree in self.manifest.trees)


def plan_conversion(
    source: Path, target: Path, options: ConvertOptions | None = None
) -> Conversion:
    """Returns what `convert` would do, after checking everything that headers can tell.

    Raises: CheckpointError or ConfigError.
    """
    options = options or ConvertOptions()
    if (source / CONVERTED_MARK).exists():
        raise CheckpointError(
            f"{source} is a converted folder already; give the published one, or add --to-hf to "
            "make a published folder of it"
        )
    config_text, model = _model(source, options)
    checkpoint = open_checkpoint(source, num_hidden_layers=model.layers)
    dtype = None if options.dtype == "auto" else jnp.dtype(options.dtype)
    trees = plan_trees(
        checkpoint,
        plan_load(checkpoint, model.module),
        dtype,
        cuts(options.tp_size, options.ep_size),
    )
    files = dict.fromkeys(entry.file for entry in checkpoint.entries.values())
    copied: dict[str, bytes | Path] = dict(_small_files(source)) | {"config.json": config_text}
    manifest = Manifest(
        options=dataclasses.asdict(options),
        source={file.name: fingerprint(file) for file in files},
        prefix=_prefix(checkpoint),
        files={name: sha256(_content(item)) for name, item in copied.items()},
        trees=trees,
    )
    return Conversion(source, target, checkpoint, manifest, copied)


def convert(
    conversion: Conversion,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    on_kept: Progress = lambda size: None,
    on_tree: Callable[[str], None] = lambda name: None,
) -> Manifest:
    """Writes the converted folder and returns its manifest; the folder appears when it is whole.

    Args:
      progress: called with bytes as they are written.
      on_kept: called with the bytes that an earlier run has written.
      on_tree: called with each tree's name when it is finished.

    Raises: CheckpointError or CapacityError; unfinished work is then kept for `resume`.
    Cost: reads and writes every byte once; host memory for a few blocks of `BLOCK_BYTES`.
    """
    report = progress or (lambda size: None)
    plan, target = conversion.manifest, conversion.target
    if resume and (finished := _finished(target, plan)):
        on_kept(conversion.total_bytes)
        return finished
    request = {
        "version": VERSION,
        "options": plan.options,
        "source": plan.source,
        "files": plan.files,
    }
    trees: list[TreeRecord] = []
    with (
        open_workspace(conversion.source, target, request, resume=resume) as space,
        reading_threads() as pool,
    ):
        left = sum(tree.size_bytes for tree in plan.trees if tree.name not in space.done)
        require_disk(target, left)
        for tree in plan.trees:
            if tree.name in space.done:
                on_kept(tree.size_bytes)
            else:
                hashed = _save(conversion.checkpoint, space.folder / tree.name, tree, pool, report)
                space.finish_unit(tree.name, tree_to_json(hashed))
                on_tree(tree.name)
            trees.append(tree_from_json(space.done[tree.name]))
        for name, item in conversion.copied.items():
            write_durably(space.folder / name, _content(item))
        done = replace(plan, trees=tuple(trees))
        write_manifest(space.folder, done)
        space.finish()
    return done


def fingerprint(file: Path) -> str:
    """Returns a hash of a weight file's size, its header and samples from all over it.

    Two models of one architecture differ in it though their headers are equal.
    """
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with open(file, "rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        found.update(stream.read(min(header, size)))
        for i in range(_SAMPLES):
            stream.seek((size - 8 - header) * i // _SAMPLES + 8 + header)
            found.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        found.update(stream.read(_SAMPLE_BYTES))
    return found.hexdigest()


def stored_values(
    checkpoint: Checkpoint, array: ArrayRecord, index: int, rows: slice | None = None
) -> np.ndarray:
    """Returns one tensor of an array as the array stores it.

    Args:
      rows: of its first axis; None: all of it.
    """
    shape = array.shape[1:] if array.experts else array.shape
    region = None if rows is None else (rows, *(slice(None) for _ in shape[1:]))
    return read_as(checkpoint, array.tensors[index], array.numpy_dtype, region, shape)


def row_blocks(array: ArrayRecord) -> list[slice]:
    """Returns the rows of an array's first axis in blocks of whole chunks, in order."""
    rows = array.shape[0] if array.shape else 1
    chunk = array.chunk[0] if array.chunk else 1
    # FP8 blocks cannot be dequantized by parts.
    if array.tensor_dtype == "F8_E4M3" and not array.experts:
        return [slice(0, rows)]
    row_bytes = max(1, array.size_bytes // max(rows, 1))
    step = max(chunk, BLOCK_BYTES // row_bytes // chunk * chunk)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def _save(
    checkpoint: Checkpoint,
    folder: Path,
    tree: TreeRecord,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> TreeRecord:
    """Writes one tree; returns its record with the hashes of what was read."""
    hashes: dict[str, list[str]] = {}

    def blocks(array: ArrayRecord) -> Iterator[tuple[slice, np.ndarray]]:
        hashes[array.path], whole = [], Hash()

        def fill(index: int, out: np.ndarray) -> str:
            out[...] = stored_values(checkpoint, array, index)
            return sha256(out)

        for rows in row_blocks(array):
            if array.experts:
                block = np.empty((rows.stop - rows.start, *array.shape[1:]), array.numpy_dtype)
                hashes[array.path] += pool.map(fill, range(rows.start, rows.stop), block)
            else:
                block = stored_values(checkpoint, array, 0, rows if array.shape else None)
                whole.update(block)
            yield rows, block
            progress(block.nbytes)
        if not array.experts:
            hashes[array.path].append(whole.hexdigest())

    leaves = {
        array.path: Streamed(
            array.shape, array.numpy_dtype, array.chunk, lambda array=array: blocks(array)
        )
        for array in tree.arrays
    }
    save_tree(folder, nest(leaves))
    arrays = (replace(array, sha256=tuple(hashes[array.path])) for array in tree.arrays)
    return TreeRecord(tree.name, tuple(arrays))


def _finished(target: Path, plan: Manifest) -> Manifest | None:
    """Returns the manifest of a target that is what the plan asks for, None if there is none."""
    if not (target / CONVERTED_MARK).exists():
        return None
    found = read_manifest(target)
    same = (found.options, found.source, found.files) == (plan.options, plan.source, plan.files)
    return found if same else None


def _model(source: Path, options: ConvertOptions) -> tuple[bytes, DeclaredModel]:
    """Returns config.json for the target and the model it describes."""
    path = source / "config.json"
    if options.layers is None:
        return path.read_bytes() if path.is_file() else b"", declared_model(source)
    if is_drafter(source):
        raise ConfigError(f"{source} is a drafter, whose layers belong together; omit --layers")
    config = ModelConfig.from_folder(source)
    if not config.first_k_dense_replace <= options.layers <= config.num_hidden_layers:
        raise ConfigError(
            f"--layers {options.layers}: {source} has {config.num_hidden_layers} layers, the first "
            f"{config.first_k_dense_replace} of them dense; give a number between"
        )
    shorter = replace(config, num_hidden_layers=options.layers)
    data = with_layers(read_json(path), options.layers)
    return json.dumps(data, indent=2).encode(), declared(shorter)


def _small_files(source: Path) -> Iterator[tuple[str, Path]]:
    """Yields what a folder holds beside weights: configuration, tokenizer, template, licence."""
    for path in sorted(source.iterdir()):
        if path.suffix not in _COPIED_SUFFIXES or path.name == INDEX_NAME or path.name[0] == ".":
            continue
        if path.is_file() and path.stat().st_size <= _MAX_COPIED_BYTES:
            yield path.name, path


def _content(item: bytes | Path) -> bytes:
    return item if isinstance(item, bytes) else item.read_bytes()


def _prefix(checkpoint: Checkpoint) -> str:
    entries = checkpoint.entries
    has_prefix = any(entry.name == PREFIX + name for name, entry in entries.items())
    return PREFIX if has_prefix else ""
