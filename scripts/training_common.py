"""Shared by the training scripts: the optimizer, the schedule, and writing published files."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon
from safetensors.numpy import save_file

from k26jax.checkpoint.index import INDEX_NAME
from k26jax.model.parameters import Params, declarations

SHARD_BYTES = 5_500_000
ADAM_NAMES = ("embed_tokens", "lm_head", "norm", "moe.gate", "bias")


def optimizer(adam_ratio: float = 0.75) -> optax.GradientTransformation:
    """Returns Muon for matrices and Adam for the rest, at learning rate 1; the caller scales.

    Matrices are the trailing two axes of a stack; embedding, head, router and norms go to Adam.
    """

    def matrices(params: Any) -> Any:
        def kind(path: Any, leaf: jax.Array) -> MuonDimensionNumbers | None:
            name = ".".join(str(part.key) for part in path)
            if any(name.endswith(adam) for adam in ADAM_NAMES):
                return None
            return MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2)

        return jax.tree_util.tree_map_with_path(kind, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            1.0,
            weight_decay=0.1,
            adam_b2=0.95,
            adam_learning_rate=adam_ratio,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=0.2,
        ),
    )


def apply(params: Params, updates: optax.Updates, rate: jax.Array) -> Params:
    """Returns the parameters moved by `rate` times the updates."""
    return jax.tree.map(lambda p, u: p + rate * u, params, updates)


@dataclasses.dataclass
class Clock:
    """How far a run is: ends after `steps` steps, or `minutes` after the program's start.

    begun: when the program started, by time.monotonic.
    start: when training started, compilation done.
    """

    steps: int
    minutes: float
    begun: float
    start: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start of training."""
        return time.monotonic() - self.start

    def progress(self, step: int) -> float:
        """Returns 0 at the start of training to 1 at its end."""
        allowed = max(60 * self.minutes - (self.start - self.begun), 1.0)
        return max(step / self.steps, self.seconds / allowed)


def schedule(progress: float, warm_up: float = 0.02) -> float:
    """Returns the factor on the peak learning rate: linear warm-up, then cosine to zero."""
    if progress < warm_up:
        return progress / warm_up
    done = min((progress - warm_up) / (1 - warm_up), 1.0)
    return 0.5 * (1 + float(np.cos(np.pi * done)))


def float32(params: Params) -> Params:
    """Returns the master copy of the parameters."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def published_tensors(module: Any, params: Params, prefix: str = "") -> dict[str, np.ndarray]:
    """Returns tensor name to array, in the declared dtype, for every parameter of a module."""
    tensors = {}
    for path, declaration in declarations(module).items():
        leaf: Any = params
        for part in path.split("."):
            leaf = leaf[part]
        host = np.asarray(leaf).astype(declaration.dtype)
        for index, name in declaration.source.names():
            tensors[prefix + name] = np.ascontiguousarray(
                host[index].reshape(declaration.tensor_shape)
            )
    return tensors


def shards(tensors: dict[str, np.ndarray], limit: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the tensors in order, as many at a time as `limit` bytes and their headers hold."""
    shard: dict[str, np.ndarray] = {}
    used = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes + len(name) + 80
        if shard and used + size > limit:
            yield shard
            shard, used = {}, 0
        shard[name] = tensor
        used += size
    yield shard


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], limit: int = SHARD_BYTES
) -> int:
    """Writes config.json and the weight files, one without an index or several; returns bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    parts = list(shards(tensors, limit))
    if len(parts) == 1:
        save_file(parts[0], folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for number, part in enumerate(parts, 1):
            name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            save_file(part, folder / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(part, name))
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX_NAME, index)
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes an object as indented JSON."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
