"""One rank of a mesh that is not there: its arrays and its programs on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding

from k26jax.bench.dummy import leaves_of, made_up, noise, without_folder
from k26jax.config import DraftConfig, EngineConfig, ModelConfig
from k26jax.engine.loading import Loaded
from k26jax.engine.memory import tree_bytes
from k26jax.engine.placement import Placement, place
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import Params, abstract, arrays, nest
from k26jax.model.target import Target, arrangement
from k26jax.sharding.collectives import first_rank_alone
from k26jax.sharding.mesh import mesh_ranks
from k26jax.sharding.rules import MESH_AXES
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models, SpecState


class OneRank(Placement):
    """The first rank of a described mesh, alone: its shards are whole arrays of one device.

    Programs are the ones that a rank runs, but for the messages: sums are its own part, and of
    what is gathered it has the best. Caches begin as noise: zeros would make all rows alike.
    """

    @classmethod
    def of(cls, tp_size: int, ep_size: int, models: Models) -> OneRank:
        """Returns the placement of (abstract) models.

        Raises: MeshError if so many ranks cannot share the target.
        """
        mesh: Any = AbstractMesh((ep_size, tp_size), MESH_AXES)
        placed = place(mesh, models)
        assert placed is not None
        return cls(**vars(placed))

    @property
    def local_devices(self) -> list[Any]:
        """The one device."""
        return jax.local_devices()[:1]

    def shard_shapes(self, name: str, shapes: Params) -> Params:
        """Returns the shapes of the rank's part of one model's parameters."""
        places = self.shardings(name)
        return nest(
            {
                path: jax.ShapeDtypeStruct(places[path].shard_shape(leaf.shape), leaf.dtype)
                for path, leaf in leaves_of(shapes)
            }
        )

    def arrange(
        self, target: nnx.Module, arrange: Callable[[Params], Params]
    ) -> tuple[OneRank, Callable[[Params], Params]]:
        """Returns the placement of a target in the kernels' layout, and `arrange` itself."""
        return OneRank(**vars(super().arrange(target, arrange)[0])), arrange

    def state_shapes(self, state: SpecState) -> SpecState:
        """Returns the shapes of the rank's part of a state."""
        device = SingleDeviceSharding(self.local_devices[0])
        specs = self._state_specs()

        def part(spec: Any) -> Callable[[Any], Any]:
            place = NamedSharding(self.mesh, spec)
            return lambda x: jax.ShapeDtypeStruct(
                place.shard_shape(x.shape), x.dtype, sharding=device
            )

        whole = jax.tree.map(part(specs.cache), state)
        if state.draft_cache is None:
            return whole
        return replace(whole, draft_cache=jax.tree.map(part(specs.draft_cache), state.draft_cache))

    def state_maker(self, make: Callable[[], SpecState]) -> Callable[[], SpecState]:
        """Returns what makes the rank's part of the state that `make` makes, its caches noise."""
        shapes = self.state_shapes(jax.eval_shape(make))

        def filled(tree: Any, first_seed: int) -> Any:
            leaves, form = jax.tree.flatten(tree)
            made = [noise(x.shape, x.dtype, first_seed + i) for i, x in enumerate(leaves)]
            return jax.tree.unflatten(form, made)

        def part() -> SpecState:
            cache, draft_cache = filled(shapes.cache, 1), filled(shapes.draft_cache, 11)
            return replace(make(), cache=cache, draft_cache=draft_cache)

        return jax.jit(part)

    def program(self, function: Callable[..., Any], *, state_at: int = 0) -> Callable[..., Any]:
        """Returns the function as the rank traces it."""

        def alone(*arguments: Any) -> Any:
            with first_rank_alone(mesh_ranks(self.mesh)):
                return function(*arguments)

        return alone


def rank_engine(
    config: EngineConfig, model: ModelConfig, draft: DraftConfig | None, plan: Plan
) -> Loaded:
    """Returns what one of the ranks of `config` holds, with made-up weights.

    The drafter's mask token is one that this rank has the row of.

    Raises: MeshError if the ranks cannot share the model, CapacityError if one device has no room
      for the part of one.
    """
    dtype = jnp.dtype(config.dtype)
    tp_size = config.tp_size or 1
    if draft is not None:
        draft = dataclasses.replace(draft, mask_token_id=model.vocab_size // tp_size - 2)
    target = abstract(lambda rngs: Target(model, dtype=dtype, rngs=rngs))
    drafter = draft and abstract(lambda rngs: Drafter(draft, dtype=dtype, rngs=rngs))
    models = Models(target, drafter)
    placement = OneRank.of(tp_size, config.ep_size, models)
    shapes = {"target": placement.shard_shapes("target", arrays(target))}
    if drafter is not None:
        shapes["drafter"] = placement.shard_shapes("drafter", arrays(drafter))
    if plan.kernels == "pallas" and model.moe_layer_ids:
        target, arrange = arrangement(target)
        placement, arrange = placement.arrange(target, arrange)
        shapes["target"] = jax.eval_shape(arrange, shapes["target"])
        models = Models(target, drafter)
    loaded = without_folder(config, models, plan, dtype, placement, params={})
    loaded.require_memory(weights=tree_bytes(shapes))
    return replace(loaded, params={name: made_up(tree, {}) for name, tree in shapes.items()})
