"""Sizes of trees that tests and benchmarks share."""

from typing import NamedTuple


class Case(NamedTuple):
    """`slots` trees of `budget` nodes from tables of `depths` rows and `width` tokens."""

    name: str
    depths: int
    width: int
    budget: int
    slots: int = 1
    is_small: bool = True


CASES = (
    Case("fewer tokens than nodes", 3, 5, 7, 3),
    Case("one row", 1, 5, 16),
    Case("more prefixes than nodes", 7, 16, 16, 2),
    Case("one token a row", 40, 1, 33),
    Case("no node", 2, 3, 0),
    Case("largest", 7, 254, 254),
    *(
        Case(f"k26 {budget} nodes, {slots} trees", 7, budget, budget, slots, is_small=False)
        for slots in (1, 8)
        for budget in (8, 16, 32, 64, 254)
    ),
)
