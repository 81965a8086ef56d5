"""Draws a draft tree and its accepted path with box-drawing characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k26jax.engine.output import StepTrace

ACCEPTED, REJECTED = "●", "○"
_GREEN, _DIM, _RESET = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def draw_tree(
    trace: StepTrace, text_of: Callable[[int], str], *, width: int = 100, color: bool = False
) -> str:
    """Returns the drawing: from left to right if it fits the width, else one node a line.

    Accepted nodes carry a full circle, the others an empty one. Siblings keep the tree's order,
    likeliest first.

    Args:
      text_of: what to show for a token.
      color: paint the accepted nodes.
    """
    children: list[list[int]] = [[] for _ in trace.parents]
    for node, parent in enumerate(trace.parents[1:], start=1):
        children[parent].append(node)
    accepted = set(trace.path)
    labels = [
        f"{ACCEPTED if node in accepted else REJECTED} {text_of(token)}"
        for node, token in enumerate(trace.token_ids)
    ]
    sizes = [_columns(label) for label in labels]
    if color:
        labels = [
            f"{_GREEN if node in accepted else _DIM}{label}{_RESET}"
            for node, label in enumerate(labels)
        ]
    ends: list[int] = []
    for node, parent in enumerate(trace.parents):
        ends.append(sizes[node] + (ends[parent] + 3 if node else 0))
    draw = _across if max(ends) <= width else _down
    return "\n".join(line.rstrip() for line in draw(0, children, labels, sizes))


def _across(node: int, children: list[list[int]], labels: list[str], sizes: list[int]) -> list[str]:
    """Returns the rows of a subtree whose first child stands to the right of its parent."""
    kids = children[node]
    if not kids:
        return [labels[node]]
    rows = []
    for number, kid in enumerate(kids):
        is_first, is_last = number == 0, kid == kids[-1]
        lead = labels[node] if is_first else " " * sizes[node]
        corner = ("───" if is_last else "─┬─") if is_first else (" └─" if is_last else " ├─")
        below = " " * sizes[node] + ("   " if is_last else " │ ")
        first, *rest = _across(kid, children, labels, sizes)
        rows += [lead + corner + first, *(below + row for row in rest)]
    return rows


def _down(node: int, children: list[list[int]], labels: list[str], sizes: list[int]) -> list[str]:
    """Returns one line for each node of a subtree, children below their parent."""
    rows = [labels[node]]
    for kid in children[node]:
        corner, below = ("└─", "  ") if kid == children[node][-1] else ("├─", "│ ")
        first, *rest = _down(kid, children, labels, sizes)
        rows += [corner + first, *(below + row for row in rest)]
    return rows


def _columns(text: str) -> int:
    """Returns the columns of a terminal that a text takes."""
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )
