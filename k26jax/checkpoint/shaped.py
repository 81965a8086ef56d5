"""Checkpoints of a configuration's shapes with random weights, in the published layout, streamed.

For tests and measurements at true size: headers, names, dtypes and file sizes are the published
ones, the values mean nothing. Vision tensors are left out.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k26jax.checkpoint.index import DTYPES
from k26jax.checkpoint.models import declared
from k26jax.checkpoint.published import Shard, TensorSpec, plan_shards, write_index, write_shard
from k26jax.checkpoint.reader import PREFIX
from k26jax.checkpoint.workspace import disk_errors, require_disk
from k26jax.config import ModelConfig, Quantization
from k26jax.config.model import NESTED_MODEL_TYPES
from k26jax.config.quantization import FP8_BLOCK, GROUP_SIZE
from k26jax.errors import CheckpointError
from k26jax.model.parameters import declarations

_BLOCK_VALUES = 8 << 20
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_WORDS, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
_FP8_SCALE = ".weight_scale_inv"


def shaped_shards(config_json: dict[str, Any]) -> list[Shard]:
    """Returns the files of a configuration's text model, in the published layout.

    Raises: ConfigError if the configuration is none that this engine runs.
    """
    config = ModelConfig.from_dict(config_json)
    module = declared(config, jnp.bfloat16).module
    prefix = PREFIX if config_json.get("model_type") in NESTED_MODEL_TYPES else ""
    groups: dict[int, list[TensorSpec]] = {n: [] for n in range(config.num_hidden_layers + 1)}
    for declaration in declarations(module).values():
        layers = declaration.source.layers
        dtype, shape = _CODES[np.dtype(declaration.dtype)], declaration.tensor_shape
        for index, name in declaration.source.names():
            group = groups[config.num_hidden_layers if layers is None else layers[index[0]]]
            is_fp8 = config.quantization is Quantization.FP8_BLOCKS and "_proj" in name
            group.append(TensorSpec(prefix + name, "F8_E4M3" if is_fp8 else dtype, shape))
            if is_fp8:
                blocks = tuple(-(-n // size) for n, size in zip(shape, FP8_BLOCK, strict=True))
                group.append(TensorSpec(f"{prefix}{name}_scale_inv", "F32", blocks))
            if name.endswith(_WORDS):
                stem = prefix + name.removesuffix(_WORDS)
                group.append(TensorSpec(stem + _SHAPE, "I32", (2,)))
    return plan_shards([group for group in groups.values() if group])


def write_shaped(
    config_json: dict[str, Any],
    folder: Path,
    *,
    seed: int = 0,
    progress: Callable[[int], None] = lambda size: None,
) -> list[Shard]:
    """Writes random weights of a configuration; equal seeds give equal files.

    Raises: CheckpointError if the folder exists and is not empty, CapacityError if the disk is too
      small.
    Cost: host memory for one block of a tensor.
    """
    shards = shaped_shards(config_json)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} exists and is no folder; give another target")
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} exists and is not empty; give another target")
    shapes = {t.name: t.shape for shard in shards for t in shard.tensors}

    def values(tensor: TensorSpec) -> Iterator[np.ndarray]:
        for block in _random(tensor, shapes, seed):
            yield block
            progress(block.nbytes)

    with disk_errors(folder):
        require_disk(folder, sum(shard.file_bytes for shard in shards))
        folder.mkdir(parents=True, exist_ok=True)
        for shard in shards:
            write_shard(folder, shard, values)
        write_index(folder, shards)
        (folder / "config.json").write_text(json.dumps(config_json, indent=2))
    return shards


def _random(
    tensor: TensorSpec, shapes: dict[str, tuple[int, ...]], seed: int
) -> Iterator[np.ndarray]:
    """Yields a tensor's values in blocks: weights of variance 1 / inputs, gains near one."""
    name, dtype = tensor.name, DTYPES[tensor.dtype]
    if name.endswith(_SHAPE):
        *rows, words = shapes[name.removesuffix(_SHAPE) + _WORDS]
        yield np.array([*rows, 8 * words], dtype)
        return
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    count = int(np.prod(tensor.shape, dtype=np.int64))
    for first in range(0, count, _BLOCK_VALUES):
        size = min(_BLOCK_VALUES, count - first)
        if tensor.dtype == "I32":
            yield rng.integers(0, 256, 4 * size, np.uint8).view(dtype)
        elif name.endswith((_SCALE, _FP8_SCALE)):
            inputs = tensor.shape[-1] * (FP8_BLOCK[1] if tensor.dtype == "F32" else GROUP_SIZE)
            spread = rng.random(size, np.float32) + np.float32(0.5)
            yield (spread * np.float32(inputs**-0.5 / 4.6)).astype(dtype)
        elif len(tensor.shape) == 1:
            mean = 0.0 if name.endswith("bias") else 1.0
            yield (mean + 0.1 * rng.standard_normal(size, np.float32)).astype(dtype)
        else:
            scale = 1.0 if dtype == ml_dtypes.float8_e4m3fn else tensor.shape[-1] ** -0.5
            yield (np.float32(scale) * rng.standard_normal(size, np.float32)).astype(dtype)
