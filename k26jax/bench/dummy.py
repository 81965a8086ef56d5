"""Engines with made-up weights, placed on their mesh without a checkpoint or a copy on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k26jax.config import Algorithm, DraftConfig, EngineConfig, ModelConfig
from k26jax.engine.loading import Loaded
from k26jax.engine.placement import Placement, place
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import Params, abstract, arrays, nest
from k26jax.model.target import Target, arrangement
from k26jax.sharding.mesh import make_mesh
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models


def dummy_engine(
    config: EngineConfig,
    model: ModelConfig,
    draft: DraftConfig | None,
    plan: Plan,
    dtype: Any,
    *,
    is_canonical: bool = False,
) -> Loaded:
    """Returns an engine's parts with weights that are a fixed function of their indices.

    Args:
      config: for its sizes; it names no folder.
      is_canonical: make the experts in published order and arrange them for the kernels, which
        takes both for a moment, so that every mesh has the same model; else they are made as the
        kernels read them.
    """
    target = abstract(lambda rngs: Target(model, dtype=dtype, rngs=rngs))
    drafter = draft and abstract(lambda rngs: Drafter(draft, dtype=dtype, rngs=rngs))
    models = Models(target, drafter)
    placement = place(make_mesh(config.tp_size or 1, config.ep_size), models)
    shapes = {"target": arrays(target)} | ({"drafter": arrays(drafter)} if drafter else {})

    def make(name: str) -> Params:
        return made_up(shapes[name], placement.shardings(name) if placement else {})

    params = {"drafter": make("drafter")} if drafter else {}
    if plan.kernels == "pallas" and model.moe_layer_ids:
        published = make("target") if is_canonical else shapes["target"]
        target, arrange = arrangement(target)
        if placement is not None:
            placement, arrange = placement.arrange(target, arrange)
        models = Models(target, drafter)
        shapes["target"] = jax.eval_shape(arrange, shapes["target"])
        params["target"] = jax.jit(arrange)(published) if is_canonical else make("target")
    else:
        params["target"] = make("target")
    return without_folder(config, models, plan, dtype, placement, params)


def without_folder(
    config: EngineConfig,
    models: Models,
    plan: Plan,
    dtype: Any,
    placement: Placement | None,
    params: dict[str, Params],
) -> Loaded:
    """Returns an engine's parts that no folder gave: without a tokenizer or ids that end a text."""
    return Loaded(
        config=config,
        models=models,
        plan=plan,
        tokenizer=None,
        eos_ids=(),
        context_length=config.context_length or models.target.config.max_position_embeddings,
        dtype=jnp.dtype(dtype),
        placement=placement,
        params=params,
    )


def plan_of(width: int, draft: DraftConfig | None, kernels: str) -> tuple[Plan, Algorithm]:
    """Returns the plan that verifies `width` rows a step, and its algorithm."""
    if width == 1 or draft is None:
        return Plan.plain(kernels), Algorithm.NONE
    return Plan.tree(width - 1, draft.depth, draft.block_size, kernels), Algorithm.DDTREE


def made_up(shapes: Params, places: Mapping[str, Any]) -> Params:
    """Returns parameters of these shapes, each made in its place.

    Args:
      places: shardings by path; without one, the first device.
    """
    return nest({path: _make(path, leaf, places.get(path)) for path, leaf in leaves_of(shapes)})


def noise(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    """Returns uniform numbers of variance 1, a fixed function of their indices."""
    unit = _mixed(shape, seed).astype(jnp.float32) * np.float32(2**-31) - 1
    return (unit * np.float32(math.sqrt(3))).astype(dtype)


def leaves_of(tree: Params, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields parameters by their paths, dots between the parts."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _make(path: str, leaf: Any, place: Any) -> jax.Array:
    """Returns one parameter in its place; each device makes its own part."""
    return jax.jit(lambda: _values(path, leaf.shape, leaf.dtype), out_shardings=place)()


def _values(path: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    name = path.rpartition(".")[2]
    if "norm" in name:
        return jnp.ones(shape, dtype)
    if name == "e_score_correction_bias":
        return jnp.zeros(shape, dtype)
    mixed = _mixed(shape, sum(path.encode()))
    if name in ("weight_packed", "gate_up_words", "down_words"):
        return _balanced(mixed).astype(dtype)
    if name == "weight_scale":
        return jnp.full(shape, (shape[-1] * 32) ** -0.5 / 4.6, dtype)
    if name in ("gate_up_scales", "down_scales"):
        # Four groups a step, of 32 inputs each; two scales share a word.
        scale = np.float32((shape[3] * 128) ** -0.5 / 4.6)
        half = int(np.asarray(scale, jnp.bfloat16).view(np.uint16))
        return jnp.full(shape, half | half << 16, dtype)
    unit = mixed.astype(jnp.float32) * np.float32(2**-31) - 1
    return (unit * np.float32(math.sqrt(3 / shape[-1]))).astype(dtype)


def _balanced(words: jax.Array) -> jax.Array:
    """Returns words of eight nibbles with 8 in the place of 0: weights of -7 to 7, of mean zero.

    A mean of half a step, the same for all, grows from layer to layer until every row looks alike
    and all choose the same experts.
    """
    is_set = words | words >> 1 | words >> 2 | words >> 3
    return words | (~is_set & jnp.uint32(0x11111111)) << 3


def _mixed(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Returns uint32 that look random, from the index alone: elementwise, so nothing is stored."""
    value = jnp.uint32(seed)
    for axis in range(len(shape)):
        index = lax.broadcasted_iota(jnp.uint32, shape, axis)
        value = (value ^ index) * jnp.uint32(0x9E3779B1)
        value = (value ^ (value >> 15)) * jnp.uint32(0x85EBCA77)
    return value ^ (value >> 13)
