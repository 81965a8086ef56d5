"""The order in which the kernel reads INT4 weights: whole tiles in one run, four planes a word.

A tile is `columns` output rows by 128 inputs. Nibble j of its word [o, r] is input 32 j + r, so a
plane of words holds exactly one scale group, and neighbouring inputs stand in neighbouring words,
as the matrix unit wants them. The scales of planes 0 and 1, and of 2 and 3, share an int32.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int16, Int32

from k26jax.errors import KernelError
from k26jax.pallas.int4_moe.reference import GROUP_SIZE, ExpertWeights

PLANES = 4
DEPTH = PLANES * GROUP_SIZE


class Tiles(NamedTuple):
    """One projection of every expert of every layer; padding decodes to zero.

    words: nibbles of q + 8.
    scales: bits of two bfloat16; plane 2 h in the low half of entry h.
    """

    words: Int16[Array, "l e tile step column lane"]
    scales: Int32[Array, "l e tile step half column"]

    @property
    def columns(self) -> int:
        """Outputs of one tile."""
        return self.words.shape[4]

    @property
    def steps(self) -> int:
        """Tiles along the inputs."""
        return self.words.shape[3]


class TiledExperts(NamedTuple):
    """All experts: gate above up in one product, and down."""

    gate_up: Tiles
    down: Tiles


def arrange(projections: Mapping[str, ExpertWeights], columns: int) -> Tiles:
    """Returns the kernel's layout of the projections of one product, one above the other.

    Raises: KernelError if an inner width is no multiple of the group size.
    Cost: reads and writes the weights once, a layer at a time.
    """
    for name, part in projections.items():
        if part.scales is None or part.values.shape[-1] * 8 % GROUP_SIZE:
            raise KernelError(
                f"{name} of the routed experts is not in INT4 groups of {GROUP_SIZE} whole inputs; "
                "the kernel has no layout for it; use kernels='reference'"
            )

    def one_layer(part: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        packed = jnp.concatenate([words for words, _ in part], axis=1)
        scales = jnp.concatenate([scales for _, scales in part], axis=1)
        return _words(packed, columns), _scale_pairs(scales, columns)

    return Tiles(
        *lax.map(one_layer, tuple((part.values, part.scales) for part in projections.values()))
    )


def _words(packed: Int32[Array, "e o words"], columns: int) -> jax.Array:
    """Returns [e, tile, step, column, 32] int16."""
    experts = packed.shape[0]
    # A canonical word holds eight inputs; a zero nibble would decode to -8.
    eights = jnp.int32(-0x77777778)
    padded = _pad(packed, columns, DEPTH // 8, eights)
    quads = padded.reshape(experts, padded.shape[1], -1, PLANES, GROUP_SIZE // 8, 1)
    nibbles = (quads >> (4 * jnp.arange(8, dtype=jnp.int32))) & 15
    planes = nibbles << (4 * jnp.arange(PLANES, dtype=jnp.int32))[:, None, None]
    words = planes.sum(axis=3, dtype=jnp.int32).astype(jnp.int16)
    return _cut(words.reshape(experts, padded.shape[1], -1, GROUP_SIZE), columns)


def _scale_pairs(scales: Float[Array, "e o groups"], columns: int) -> jax.Array:
    """Returns [e, tile, step, 2, column] int32."""
    padded = _pad(scales, columns, PLANES, jnp.zeros((), scales.dtype))
    bits = lax.bitcast_convert_type(padded.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    halves = bits.reshape(*padded.shape[:2], -1, 2, 2)
    pairs = lax.bitcast_convert_type(halves[..., 0] | (halves[..., 1] << 16), jnp.int32)
    return _cut(pairs, columns).swapaxes(-1, -2)


def _pad(x: jax.Array, columns: int, width: int, fill: jax.Array) -> jax.Array:
    pads = [(0, 0, 0), (0, -x.shape[1] % columns, 0), (0, -x.shape[2] % width, 0)]
    return lax.pad(x, fill, pads)


def _cut(x: jax.Array, columns: int) -> jax.Array:
    """Returns [e, tile, step, column, ...] of [e, o, step, ...]."""
    experts, outputs, *rest = x.shape
    return x.reshape(experts, outputs // columns, columns, *rest).swapaxes(2, 3)
