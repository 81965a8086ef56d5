"""Draws a draft tree and its accepted path with plain characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k26jax.engine.output import StepTrace

_GREEN, _RESET = "\x1b[32m", "\x1b[0m"


def draw_tree(trace: StepTrace, text_of: Callable[[int], str], color: bool = False) -> str:
    """Returns one line per node, children below their parent; accepted nodes carry a `*`.

    Args:
      text_of: a token's text.
      color: also paint accepted nodes green.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(trace.parents):
        children.setdefault(parent, []).append(node)
    accepted = set(trace.path)
    lines: list[str] = []
    # (node, the prefix of its line, the prefix of its children's lines), last pushed drawn first
    waiting = [(0, "", "")]
    while waiting:
        node, here, below = waiting.pop()
        mark = "*" if node in accepted else " "
        line = f"{mark} {here}{text_of(trace.token_ids[node])}"
        lines.append(f"{_GREEN}{line}{_RESET}" if color and node in accepted else line)
        kids = children.get(node, [])
        for number, kid in enumerate(reversed(kids)):
            is_last = number == 0
            branch, rest = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
            waiting.append((kid, below + branch, below + rest))
    return "\n".join(lines)
