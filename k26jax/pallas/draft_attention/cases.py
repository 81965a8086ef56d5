"""Shapes of draft_attention that tests and benchmarks share."""

from typing import NamedTuple


class Case(NamedTuple):
    """One call: a block of `rows` in each slot, over caches in which `lengths` rows are in use.

    is_small: fit for interpret mode.
    """

    name: str
    rows: int
    heads: int
    kv_heads: int
    width: int
    lengths: tuple[int, ...]
    capacity: int
    window: int | None = None
    causal: bool = False
    is_small: bool = False


CASES = (
    Case("trained pair", 8, 4, 2, 16, (0, 1, 31, 32, 33, 90), 96, is_small=True),
    Case("causal, odd sizes", 5, 6, 2, 24, (0, 17, 111), 111, None, True, is_small=True),
    Case("causal, window", 16, 2, 1, 32, (3, 100, 130), 130, 10, True, is_small=True),
    Case("one row, one key", 1, 2, 2, 16, (0, 64), 70, 1, is_small=True),
    Case("rows of two tiles", 9, 16, 1, 16, (70,), 80, 20, is_small=True),
    *(
        Case(f"TP-8 rank {length // 1024}k", 16, 8, 1, 128, (length,), length)
        for length in (4096, 32768, 131072)
    ),
    *(
        Case(f"whole drafter {length // 1024}k", 16, 64, 8, 128, (length,), length)
        for length in (4096, 32768, 131072)
    ),
    Case("whole drafter, window 2k of 128k", 16, 64, 8, 128, (131072,), 131072, 2048),
    Case("small block, 4 key heads 32k", 8, 32, 4, 128, (32768,), 32768),
    Case("two slots, causal 32k", 16, 64, 8, 128, (32768, 1000), 32768, None, True),
)
SMALL_CASES = tuple(case for case in CASES if case.is_small)
