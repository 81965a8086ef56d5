"""Shapes of the products that tests and benchmarks share.

The large ones are those of Kimi K2.6 on one of eight tensor-parallel ranks.
"""

from typing import NamedTuple


class Case(NamedTuple):
    """Weights [layers, n, k] that share their rows, all in one launch.

    widths: columns n of each weight; of `gated` the first is that of gate and up.
    is_gated: a launch of `gated`, not of `dense`.
    is_parts: a launch of `partial_sums`.
    is_small: fit for interpret mode.
    """

    name: str
    k: int
    widths: tuple[int, ...]
    is_gated: bool = False
    is_parts: bool = False
    is_small: bool = False


class HeadsCase(NamedTuple):
    """Shapes of kv_b and of the query it is absorbed into.

    is_small: fit for interpret mode.
    """

    name: str
    heads: int
    nope: int
    value: int
    latent: int
    rope: int
    is_small: bool = False


CASES = (
    Case("one_block", 64, (16,), is_small=True),
    Case("tails", 200, (40, 70), is_small=True),
    Case("odd", 33, (7,), is_small=True),
    Case("long", 1100, (24,), is_small=True),
    Case("gated", 200, (40,), is_gated=True, is_small=True),
    Case("gated_beside", 96, (40, 17, 5), is_gated=True, is_small=True),
    Case("parts", 1100, (40, 24, 7), is_parts=True, is_small=True),
    Case("q_a_kv_a", 7168, (1536, 576), is_parts=True),
    Case("q_b", 1536, (1536,)),
    Case("o", 1024, (7168,)),
    Case("shared_router", 7168, (256, 256, 384), is_parts=True),
    Case("mlp_up", 7168, (2304,), is_gated=True),
    Case("mlp_down", 2304, (7168,)),
    Case("lm_head", 7168, (20480,)),
)

HEADS_CASES = (
    HeadsCase("trained_pair", 4, 32, 32, 96, 16, is_small=True),
    HeadsCase("odd", 3, 24, 20, 40, 8, is_small=True),
    HeadsCase("k26", 8, 128, 128, 512, 64),
)
