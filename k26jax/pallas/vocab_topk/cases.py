"""Shapes of the search for the best tokens that tests and benchmarks share."""

from typing import NamedTuple


class Case(NamedTuple):
    """The `count` best of `width` tokens in each of `rows` rows.

    columns: of a chunk.
    is_small: fit for interpret mode.
    """

    name: str
    rows: int
    width: int
    count: int
    columns: int = 4096
    is_small: bool = True


CASES = (
    Case("all of few", 5, 24, 24, 256),
    Case("one", 1, 700, 1, 128),
    Case("fewer groups than tokens", 3, 300, 254, 128),
    Case("several chunks", 4, 1000, 40, 256),
    Case("one chunk", 2, 4000, 70),
    *(Case(f"k26 k={k}", 7, 163_840, k, is_small=False) for k in (16, 64, 254)),
    Case("k26 tp8", 7, 20_480, 64, is_small=False),
    *(Case(f"k26 t={t}", t, 163_840, 1, is_small=False) for t in (1, 16, 64)),
    Case("k26 tp8 t=16", 16, 20_480, 1, is_small=False),
)
