"""Lays the experts out for the kernels, one product after the other, so that memory holds them.

While a product is laid out, both of its layouts exist; the rest exists once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from k26jax.engine.memory import tree_bytes
from k26jax.engine.placement import Placement
from k26jax.model.moe import PRODUCTS
from k26jax.model.parameters import Params, arrays
from k26jax.model.target import Target, arrangement


@dataclass(frozen=True)
class Turn:
    """One product's change of layout.

    target, placement: as they are behind it, the target abstract.
    program: makes its parameters of those before it.
    new_bytes: what a device holds twice meanwhile.
    """

    target: Target
    placement: Placement | None
    program: Callable[[Params], Params]
    new_bytes: int


def turns(target: Target, placement: Placement | None) -> Iterator[Turn]:
    """Yields the changes from the published layout to the kernels'; nothing is computed.

    Raises: KernelError if the experts have no such layout.
    """
    if not target.config.moe_layer_ids:
        return
    for product in PRODUCTS:
        target, program = arrangement(target, (product,))
        if placement is not None:
            placement, program = placement.arrange(target, program)
        yield Turn(target, placement, program, _new_bytes(target, placement, product))


def run(turn: Turn, params: Params) -> Params:
    """Returns the target's parameters behind a turn.

    Donates: params.
    """
    with warnings.catch_warnings():
        # What changes its layout cannot stay in its memory, which is freed all the same.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return jax.block_until_ready(jax.jit(turn.program, donate_argnums=0)(params))


def _new_bytes(target: Target, placement: Placement | None, product: str) -> int:
    held: dict[str, Any] = arrays(target)["moe"]["experts"]
    new = {f"moe.experts.{name}": leaf for name, leaf in held.items() if name.startswith(product)}
    if placement is None:
        return tree_bytes(new)
    places = placement.shardings("target")
    return tree_bytes(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path])
            for path, leaf in new.items()
        }
    )
