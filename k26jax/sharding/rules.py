"""Which mesh axis cuts which logical axis: one table, and the checks that a cut is possible.

Every parameter names its axes where it is declared; nothing else says how a model is spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from jax.sharding import PartitionSpec

from k26jax.errors import MeshError, nearest

EXPERT, MODEL = "expert", "model"
MESH_AXES = (EXPERT, MODEL)
FLAGS = {EXPERT: "--ep-size", MODEL: "--tp-size"}

# Everything outside the routed experts is whole on every rank of `expert`: one rule for all of it,
# and a number of expert ranks asks nothing of the heads or of the vocabulary.
RULES: dict[str, str | None] = {
    "layer": None,
    "hidden": None,
    "latent": None,
    "q_latent": None,
    "nope_value": None,
    "head_dim": None,
    "router": None,
    "head": MODEL,
    "kv_head": MODEL,
    "ffn": MODEL,
    "vocab": MODEL,
    "feature": MODEL,
    "expert": EXPERT,
    # Of the kernel's layout of INT4 experts, which each rank makes of its own part.
    "ffn_tile": MODEL,
    "ffn_step": MODEL,
    "tile": None,
    "step": None,
    "column": None,
    "half": None,
    "lane": None,
}

MOST_SHOWN = 64  # numbers of ranks that an error tries out

_PACKED, _SCALE = "weight_packed", "weight_scale"
_WORD, _GROUP = 8, 32


class _UnevenError(MeshError):
    """Parts that ranks along one mesh axis cannot share; another number of them may do."""

    def __init__(self, message: str, mesh_axis: str):
        super().__init__(message)
        self.mesh_axis = mesh_axis


class Declared(Protocol):
    """What the rules read of a declared parameter."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def axes(self) -> tuple[str, ...]: ...


def partition_specs(
    declared: Mapping[str, Declared], ranks: Mapping[str, int], units: Mapping[str, int]
) -> dict[str, PartitionSpec]:
    """Returns how each parameter is cut, by its path.

    Args:
      ranks: number of ranks along each mesh axis.
      units: by logical axis, the number of pieces along it that must stay whole, such as heads.

    Raises: MeshError that names the tensor and the numbers, if a cut is uneven, goes through a
      unit or an INT4 scale group, or two axes of a tensor would be cut for one mesh axis.
    """
    try:
        return _checked_specs(declared, ranks, units)
    except _UnevenError as error:
        good = _sizes_that_divide(declared, ranks, units, error.mesh_axis)
        raise MeshError(f"{error}; {FLAGS[error.mesh_axis]} can be {good} here") from None


def _sizes_that_divide(
    declared: Mapping[str, Declared],
    ranks: Mapping[str, int],
    units: Mapping[str, int],
    mesh_axis: str,
) -> str:
    """Returns the numbers of ranks along an axis that all tensors allow, in words."""
    # Along the other axis one rank: it may be at fault too, and is named in its turn.
    alone = dict.fromkeys(ranks, 1)
    good = []
    for number in range(1, MOST_SHOWN + 1):
        try:
            _checked_specs(declared, alone | {mesh_axis: number}, units)
        except _UnevenError:
            continue
        good.append(str(number))
    return " or ".join([", ".join(good[:-1]), good[-1]] if good[1:] else good)


def _checked_specs(
    declared: Mapping[str, Declared], ranks: Mapping[str, int], units: Mapping[str, int]
) -> dict[str, PartitionSpec]:
    for path, item in declared.items():
        stem, _, kind = path.rpartition(".")
        if kind == _PACKED:
            _check_groups(path, item, declared[f"{stem}.{_SCALE}"], ranks)
    return {path: _spec(path, item, ranks, units) for path, item in declared.items()}


def axes_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Returns how a tensor with these axes is cut; its sizes are not looked at."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def _spec(
    path: str, item: Declared, ranks: Mapping[str, int], units: Mapping[str, int]
) -> PartitionSpec:
    taken: dict[str, str] = {}
    for size, axis in zip(item.shape, item.axes, strict=True):
        if axis not in RULES:
            raise MeshError(
                f"{_name(path, item)} has an axis {axis!r} that no rule of sharding/rules.py "
                f"knows{nearest(axis, RULES)}"
            )
        target = RULES[axis]
        if target is None:
            continue
        if target in taken:
            raise MeshError(
                f"{_name(path, item)}: axes {taken[target]!r} and {axis!r} would both be cut for "
                f"mesh axis {target!r}; a tensor can be cut once for each"
            )
        taken[target] = axis
        whole = units.get(axis, size)
        if whole % ranks[target] or size % ranks[target]:
            of = f" of {whole} {axis}s" if whole != size else ""
            raise _UnevenError(
                f"{_name(path, item)}: its {size} entries{of} along axis {axis!r} cannot be shared "
                f"evenly by {ranks[target]} ranks of mesh axis {target!r}",
                target,
            )
    return axes_spec(item.axes)


def _check_groups(path: str, packed: Declared, scales: Declared, ranks: Mapping[str, int]) -> None:
    """Raises MeshError unless words and scales of INT4 rows are cut at the same group borders."""
    target = RULES.get(packed.axes[-1])
    if target is None:
        return
    words, groups, parts = packed.shape[-1], scales.shape[-1], ranks[target]
    if groups % parts or words % parts or words // parts * _WORD != groups // parts * _GROUP:
        raise _UnevenError(
            f"{_name(path, packed)}: its rows of {words * _WORD} INT4 numbers have {groups} scale "
            f"groups of {_GROUP}, which {parts} ranks of mesh axis {target!r} cannot share without "
            "cutting a group",
            target,
        )


def _name(path: str, item: Declared) -> str:
    return f"{path} {list(item.shape)}"
