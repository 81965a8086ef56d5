"""One declaration per parameter: shape, type, axes, initial values and published source.

Random initialisation, loading, inspection, sharding and the memory estimate all read these
declarations; there is no second description of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

Params = dict[str, Any]
Module = TypeVar("Module", bound=nnx.Module)


@dataclass(frozen=True)
class Source:
    """Where a stacked parameter comes from in the published files.

    template: tensor name with `{layer}` and `{expert}` where the stack has those axes.
    layers: published layer numbers along the first axis; None: the parameter is not stacked.
    experts: number of experts along the second axis; None: no expert axis.
    published_shape: shape of one tensor in the file, when it is not the stack's trailing shape.
    published_dtypes: dtypes the file may hold, safetensors spelling.
    """

    template: str
    layers: tuple[int, ...] | None = None
    experts: int | None = None
    published_shape: tuple[int, ...] | None = None
    published_dtypes: tuple[str, ...] = ("BF16", "F16", "F32", "F8_E4M3")

    def names(self) -> list[tuple[tuple[int, ...], str]]:
        """Returns (index into the stack, tensor name) of every tensor, in stack order."""
        if self.layers is None:
            return [((), self.template)]
        if self.experts is None:
            return [((i,), self.template.format(layer=n)) for i, n in enumerate(self.layers)]
        return [
            ((i, e), self.template.format(layer=n, expert=e))
            for i, n in enumerate(self.layers)
            for e in range(self.experts)
        ]


@dataclass(frozen=True)
class Declaration:
    """A declared parameter: abstract shape and dtype, logical axes, published source."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str, ...]
    source: Source

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one published tensor of the stack."""
        stacked = (self.source.layers is not None) + (self.source.experts is not None)
        return self.source.published_shape or self.shape[stacked:]


def normal(scale: float) -> Callable[..., jax.Array]:
    """Returns an initialiser that draws normal values with the given standard deviation."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return init


def ones(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns ones; the initial gain of a norm."""
    return jnp.ones(shape, dtype)


def declare(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    source: Source,
    *,
    dtype: Any,
    init: Callable[..., jax.Array] | None = None,
) -> nnx.Param:
    """Returns a parameter with its declaration attached as metadata.

    Args:
      init: called with (key, shape, dtype); default: normal, variance 1 / fan-in.
    """
    init = init or normal(shape[-1] ** -0.5)
    return nnx.Param(init(rngs.params(), shape, dtype), axes=axes, source=source)


def declarations(module: nnx.Module) -> dict[str, Declaration]:
    """Returns every parameter's declaration by its path, dots between the parts."""
    return {
        ".".join(map(str, path)): Declaration(
            tuple(variable.shape), jnp.dtype(variable.dtype), variable.axes, variable.source
        )
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }


def abstract(build: Callable[[nnx.Rngs], Module]) -> Module:
    """Returns the module with shapes in place of arrays; costs no memory."""
    return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


def arrays(module: nnx.Module) -> Params:
    """Returns the module's parameters as a nested dict, the form the jitted programs take."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def bind(module: Module, params: Params) -> Module:
    """Returns the (abstract) module with `params` as its parameters; free inside a trace."""
    graph, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def nest(flat: dict[str, Any]) -> Params:
    """Returns the nested dict of a dict with dotted paths."""
    nested: Params = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return nested
