"""The mesh of devices, and programs that run on all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from k26jax.errors import MeshError
from k26jax.sharding.rules import MESH_AXES

REPLICATED = PartitionSpec()


def make_mesh(tp_size: int, ep_size: int, devices: Sequence[Any] | None = None) -> Mesh | None:
    """Returns the mesh of ep_size x tp_size devices, axes `expert` and `model`; None for one.

    Neighbours along `model` are neighbours in the list, so they share a host where they can.

    Args:
      devices: default: all that JAX sees, of every process.

    Raises: MeshError if there are fewer, or a process of the run would have no part in the mesh.
    """
    devices = jax.devices() if devices is None else list(devices)
    wanted = tp_size * ep_size
    if wanted > len(devices):
        raise MeshError(
            f"--tp-size {tp_size} times --ep-size {ep_size} takes {wanted} devices, and there are "
            f"{len(devices)} ({devices[0].platform}: {devices[0].device_kind}); use fewer, or more "
            "processes with devices of their own"
        )
    if jax.process_count() > 1 and wanted != len(devices):
        raise MeshError(
            f"--tp-size {tp_size} times --ep-size {ep_size} takes {wanted} devices, but the "
            f"{jax.process_count()} processes of this run have {len(devices)}; a run of several "
            "processes uses all of them"
        )
    if wanted == 1:
        return None
    return jax.make_mesh(
        (ep_size, tp_size),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices[:wanted],
    )


def mesh_ranks(mesh: Mesh) -> dict[str, int]:
    """Returns the number of ranks along each axis."""
    return {axis: mesh.shape[axis] for axis in MESH_AXES}


def on_mesh(
    function: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns the function run by every rank on its parts; itself without a mesh."""
    if mesh is None:
        return function
    # The check knows neither Pallas kernels nor that gathered choices are the same everywhere.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Returns the tree of partition specs as shardings on a mesh."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def specs_of(arrays: Any) -> Any:
    """Returns how the arrays of a tree, or what stands for them, are cut."""
    return jax.tree.map(lambda x: x.sharding.spec, arrays)
