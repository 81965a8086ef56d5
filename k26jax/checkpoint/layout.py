"""Plans the trees of a converted folder: which array holds which tensors, and in what pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from k26jax.checkpoint.index import DTYPES
from k26jax.checkpoint.load import Plan
from k26jax.checkpoint.manifest import OUTSIDE_LAYERS, ArrayRecord, TreeRecord, layer_name
from k26jax.checkpoint.reader import Checkpoint
from k26jax.errors import CheckpointError
from k26jax.model.parameters import Declaration
from k26jax.sharding.rules import EXPERT, MODEL, RULES

CHUNK_BYTES = 64 << 20
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_DEQUANTIZED = {"F8_E4M3": "BF16"}


def cuts(tp_size: int, ep_size: int) -> dict[str, int]:
    """Returns into how many pieces each logical axis is cut; axes that are not named stay whole."""
    ranks = {EXPERT: ep_size, MODEL: tp_size}
    return {axis: ranks[target] for axis, target in RULES.items() if target is not None}


def plan_trees(
    checkpoint: Checkpoint, plan: Plan, dtype: Any = None, cut: Mapping[str, int] | None = None
) -> tuple[TreeRecord, ...]:
    """Returns the trees that a checkpoint becomes, layers first.

    Args:
      plan: of all its tensors.
      dtype: of the arrays that are declared in it; None: each as published, FP8 blocks in BF16.
      cut: pieces by logical axis, on whose edges chunks end.

    Raises: CheckpointError naming the tensor if a cut does not divide an axis, or an array's
      tensors are of several dtypes and no `dtype` says which to take.
    """
    trees: dict[str, list[ArrayRecord]] = {}
    layers = sorted({n for declared, _ in plan.values() for n in declared.source.layers or ()})
    for layer in layers:
        trees[layer_name(layer)] = []
    for path, (declaration, names) in plan.items():
        if declaration.source.layers is None:
            groups = {OUTSIDE_LAYERS: [name for _, name in names]}
        else:
            groups = {layer_name(layer): [] for layer in declaration.source.layers}
            for index, name in names:
                groups[layer_name(declaration.source.layers[index[0]])].append(name)
        for tree, tensors in groups.items():
            record = _array(checkpoint, path, declaration, tensors, dtype, cut or {})
            trees.setdefault(tree, []).append(record)
    return tuple(TreeRecord(name, tuple(arrays)) for name, arrays in trees.items())


def _array(
    checkpoint: Checkpoint,
    path: str,
    declaration: Declaration,
    tensors: Sequence[str],
    dtype: Any,
    cut: Mapping[str, int],
) -> ArrayRecord:
    is_stacked = declaration.source.layers is not None
    found = sorted({checkpoint.entry(name).dtype for name in tensors})
    # Router bias, INT4 words and scales have a dtype of their own, which no option changes.
    if dtype is not None and declaration.dtype == jnp.dtype(dtype):
        stored = _CODES[np.dtype(declaration.dtype)]
    elif len({_DEQUANTIZED.get(code, code) for code in found}) == 1:
        stored = _DEQUANTIZED.get(found[0], found[0])
    else:
        raise CheckpointError(
            f"{checkpoint.folder}: the tensors of {path} ({tensors[0]} ...) are of several dtypes, "
            f"{', '.join(found)}; choose one with --dtype"
        )
    shape, axes = declaration.shape[is_stacked:], declaration.axes[is_stacked:]
    itemsize = DTYPES[stored].itemsize
    return ArrayRecord(
        path=path,
        shape=shape,
        dtype=stored,
        axes=axes,
        chunk=_chunk(tensors[0], shape, axes, itemsize, cut),
        tensors=tuple(tensors),
        tensor_shape=declaration.tensor_shape,
        tensor_dtype=found[0] if len(found) == 1 else "several",
        experts=declaration.source.experts is not None,
        shape_dtype=_shape_dtype(checkpoint, tensors[0]),
    )


def _shape_dtype(checkpoint: Checkpoint, name: str) -> str | None:
    companion = f"{name.removesuffix('_packed')}_shape"
    has_one = name.endswith("_packed") and companion in checkpoint
    return checkpoint.entry(companion).dtype if has_one else None


def _chunk(
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    itemsize: int,
    cut: Mapping[str, int],
) -> tuple[int, ...]:
    """Returns the largest pieces that no cut crosses, one expert each, of about `CHUNK_BYTES`."""
    piece = []
    for size, axis in zip(shape, axes, strict=True):
        count = cut.get(axis, 1)
        if size % count:
            raise CheckpointError(
                f"tensor {name!r}: its axis {axis!r} of {size} does not divide into {count} equal "
                "pieces; choose another --tp-size or --ep-size"
            )
        piece.append(size // count)
    if axes[:1] == ("expert",):
        piece[0] = 1
    row = next((i for i, size in enumerate(piece) if size > 1), None)
    if row is None:
        return tuple(piece)
    most = max(1, CHUNK_BYTES // (math.prod(piece[row + 1 :]) * itemsize))
    piece[row] = max(n for n in _divisors(piece[row]) if n <= most)
    return tuple(piece)


def _divisors(size: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})
