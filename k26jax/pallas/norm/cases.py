"""Shapes of norms, rotations and cache writes that tests and benchmarks share.

The large ones are those of Kimi K2.6 on one of eight tensor-parallel ranks.
"""

from typing import NamedTuple


class RowCase(NamedTuple):
    """Width of the rows of an RMS norm.

    is_small: fit for interpret mode.
    """

    name: str
    width: int
    is_small: bool = False


class HeadsCase(NamedTuple):
    """Widths of MLA's latents and heads, and of a drafter head of twice `rope`.

    is_small: fit for interpret mode.
    """

    name: str
    heads: int
    nope: int
    rope: int
    latent: int
    query_rank: int
    is_small: bool = False


class AppendCase(NamedTuple):
    """A cache [layers, slots, capacity, ...] for each of `widths`.

    is_small: fit for interpret mode.
    """

    name: str
    layers: int
    slots: int
    capacity: int
    widths: tuple[tuple[int, ...], ...]
    is_small: bool = False


ROW_CASES = (
    RowCase("power_of_two", 64, is_small=True),
    RowCase("odd", 200, is_small=True),
    RowCase("hidden", 7168),
)

HEADS_CASES = (
    HeadsCase("trained_pair", 4, 32, 16, 96, 80, is_small=True),
    HeadsCase("odd", 11, 20, 12, 40, 33, is_small=True),
    HeadsCase("k26", 8, 128, 64, 512, 1536),
)

APPEND_CASES = (
    AppendCase("latent", 3, 4, 9, ((24,), (8,)), is_small=True),
    AppendCase("keys_values", 2, 3, 7, ((2, 5), (2, 5)), is_small=True),
    AppendCase("k26", 61, 2, 8192, ((512,), (64,))),
)
