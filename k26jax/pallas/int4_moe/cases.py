"""Named sizes that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Routed experts of one layer.

    is_small: fits the interpreter.
    """

    name: str
    tokens: int
    hidden: int
    inner: int
    n_experts: int
    top_k: int
    is_small: bool = True


CASES = (
    Case("one token", 1, 64, 32, 10, 3),
    Case("more rows than a tile", 17, 64, 64, 5, 3),
    Case("inputs that fill no tile", 3, 160, 96, 5, 2),
    Case("sum in parts", 2, 672, 32, 2, 1),
    Case("long down product", 2, 32, 672, 2, 1),
    *(
        Case(f"K2.6 TP-8 T={tokens}", tokens, 7168, 256, 384, 8, is_small=False)
        for tokens in (1, 8, 16, 32, 64)
    ),
    Case("K2.6 EP-8", 48, 7168, 2048, 48, 1, is_small=False),
)
SMALL_CASES = tuple(case for case in CASES if case.is_small)
