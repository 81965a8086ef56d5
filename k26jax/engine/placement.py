"""Where parameters, caches and slots live on a mesh, and programs that run there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k26jax.errors import MeshError
from k26jax.model.parameters import Params, declarations, nest
from k26jax.sharding.mesh import REPLICATED, mesh_ranks, on_mesh, shardings
from k26jax.sharding.rules import MODEL, axes_spec, partition_specs
from k26jax.spec.state import Models, SpecState

Specs = dict[str, PartitionSpec]


@dataclass(frozen=True)
class Placement:
    """How the models of an engine are spread over a mesh.

    specs: by model ("target", "drafter") and path, how each parameter is cut.
    is_drafter_cut: whether the ranks share the drafter; else each runs all of it.
    """

    mesh: Mesh
    specs: dict[str, Specs]
    is_drafter_cut: bool

    def shardings(self, name: str) -> dict[str, NamedSharding]:
        """Returns the places of one model's parameters, by their path."""
        return shardings(self.mesh, self.specs[name])

    @property
    def local_devices(self) -> list[Any]:
        """The devices of this process."""
        return list(self.mesh.local_devices)

    def weight_bytes(self, models: Models) -> int:
        """Returns the bytes of the (abstract) models' parameters that each device holds."""
        return sum(
            math.prod(place.shard_shape(declared[path].shape)) * declared[path].dtype.itemsize
            for name in self.specs
            for declared in [declarations(getattr(models, name))]
            for path, place in self.shardings(name).items()
        )

    def sharding_for(self, name: str) -> Callable[[tuple[str, ...]], NamedSharding]:
        """Returns what gives the place of one model's parameters by their logical axes."""
        is_whole = name == "drafter" and not self.is_drafter_cut

        def place(axes: tuple[str, ...]) -> NamedSharding:
            return NamedSharding(self.mesh, REPLICATED if is_whole else axes_spec(axes))

        return place

    def put(self, params: Params) -> Params:
        """Returns the models' parameters, of any place, on the mesh."""
        places = {name: nest(self.shardings(name)) for name in self.specs}
        return jax.device_put(params, places)

    def without_drafter(self) -> Placement:
        """Returns the placement of the target alone."""
        return replace(self, specs={"target": self.specs["target"]}, is_drafter_cut=False)

    def state_maker(self, make: Callable[[], SpecState]) -> Callable[[], SpecState]:
        """Returns the program that makes on the mesh the state that `make` makes."""
        shapes = self.state_shapes(jax.eval_shape(make))
        return jax.jit(lambda: make(), out_shardings=places_of(shapes))

    def state_shapes(self, state: SpecState) -> SpecState:
        """Returns the shapes of a state with their places: whole, but for the drafter's heads."""
        specs = self._state_specs()

        def placed(spec: PartitionSpec) -> Callable[[Any], Any]:
            place = NamedSharding(self.mesh, spec)
            return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return replace(
            jax.tree.map(placed(REPLICATED), state),
            draft_cache=jax.tree.map(placed(specs.draft_cache or REPLICATED), state.draft_cache),
        )

    def program(self, function: Callable[..., Any], *, state_at: int) -> Callable[..., Any]:
        """Returns function(params, ...) -> (state, result), run by every rank on its parts.

        Args:
          state_at: place of the state among three arguments; the other one and the result are
            the same on all ranks.
        """
        state = self._state_specs()
        arguments = [{name: nest(specs) for name, specs in self.specs.items()}, *[REPLICATED] * 2]
        arguments[state_at] = state
        return on_mesh(function, self.mesh, tuple(arguments), (state, REPLICATED))

    def arrange(
        self, target: nnx.Module, arrange: Callable[[Params], Params]
    ) -> tuple[Placement, Callable[[Params], Params]]:
        """Returns the placement of a target in the kernels' layout, and `arrange` on the mesh.

        Args:
          target: as `arrange` leaves it, abstract.
          arrange: makes a rank's part of the layout of its part of the parameters.
        """
        flat = nnx.to_flat_state(nnx.state(target, nnx.Param))
        made = {".".join(map(str, path)): axes_spec(variable.axes) for path, variable in flat}
        before = nest(self.specs["target"])
        program = on_mesh(arrange, self.mesh, (before,), nest(made))
        return replace(self, specs=self.specs | {"target": made}), program

    def _state_specs(self) -> Any:
        heads = PartitionSpec(None, None, None, MODEL) if self.is_drafter_cut else REPLICATED
        specs: dict[str, Any] = {item.name: REPLICATED for item in fields(SpecState)}
        specs["draft_cache"] = heads if "drafter" in self.specs else None
        return SpecState(**specs)


def places_of(tree: Any) -> Any:
    """Returns the shardings of a tree's arrays, or of what stands for them."""
    return jax.tree.map(lambda x: x.sharding, tree)


def place(mesh: Mesh | None, models: Models) -> Placement | None:
    """Returns how (abstract) models are spread over a mesh; None without one.

    A drafter that the ranks of `model` cannot share evenly is run whole by each of them.

    Raises: MeshError if they cannot share the target.
    """
    if mesh is None:
        return None
    ranks = mesh_ranks(mesh)
    heads = {"head": models.target.config.num_attention_heads}
    specs = {"target": partition_specs(declarations(models.target), ranks, heads)}
    is_drafter_cut = False
    if models.drafter is not None:
        specs["drafter"], is_drafter_cut = _drafter_specs(models.drafter, ranks)
    return Placement(mesh, specs, is_drafter_cut)


def _drafter_specs(drafter: Any, ranks: dict[str, int]) -> tuple[Specs, bool]:
    config, declared = drafter.config, declarations(drafter)
    heads = {"head": config.num_attention_heads, "kv_head": config.num_key_value_heads}
    try:
        return partition_specs(declared, ranks, heads), ranks[MODEL] > 1
    except MeshError:
        return dict.fromkeys(declared, REPLICATED), False
