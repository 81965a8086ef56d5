"""Shapes of tree_mla that tests and benchmarks share."""

from typing import NamedTuple


class Case(NamedTuple):
    """One call: `rows` tree rows of `heads` heads over caches in which `lengths` rows are in use.

    is_small: fit for interpret mode.
    """

    name: str
    rows: int
    heads: int
    lengths: tuple[int, ...]
    capacity: int
    latent: int = 512
    rope: int = 64
    is_small: bool = False


CASES = (
    Case("one row", 1, 2, (0, 1, 40, 63, 64), 64, 32, 8, is_small=True),
    Case("heads that fill no tile", 5, 3, (0, 31, 32, 100), 111, 96, 16, is_small=True),
    Case("heads of two tiles", 2, 20, (70,), 80, 32, 8, is_small=True),
    Case("two words of ancestors", 40, 2, (0, 90), 200, 32, 8, is_small=True),
    *(
        Case(f"K2.6 TP-8 T={rows} {length // 1024}k", rows, 8, (length,), length + 64)
        for rows in (1, 16, 64)
        for length in (4096, 32768, 131072)
    ),
    *(
        Case(f"K2.6 T={rows} {length // 1024}k", rows, 64, (length,), length + 64)
        for rows in (1, 16)
        for length in (4096, 32768)
    ),
)
SMALL_CASES = tuple(case for case in CASES if case.is_small)
