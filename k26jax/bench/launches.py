"""What a compiled program launches, read from its text: how many kernels, and for which stage."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

STAGES = ("draft", "tree_build", "verify", "accept", "compact")
# Instructions of XLA's last form that put nothing on the device by themselves.
_FREE = {
    "after-all", "bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter",
    "partition-id", "replica-id", "tuple",
}  # fmt: skip
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%\S+ = .*?[\]})] ([a-z][\w-]*)\(")
_HEADER = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*\{$")


def launched(text: str) -> list[str]:
    """Returns where each launch of one step comes from: its path of scopes; "" if XLA made it.

    Of a program with a loop, one turn of its first loop is read; of a choice, the branch that
    launches least, which is the greedy one. A loop inside is counted once.

    Args:
      text: of a compiled program.
    """
    computations, entry = _computations(text)
    lines = computations[entry]
    body = next((_called(line, "body") for line in lines if _opcode(line) == "while"), None)
    return list(_walk(computations, body or entry))


def by_stage(paths: list[str]) -> Counter[str]:
    """Returns the launches of each stage; "" has those that belong to none."""
    return Counter(next((s for s in STAGES if f"/{s}/" in f"/{path}/"), "") for path in paths)


def per_layer(paths: list[str], layers: tuple[int, ...]) -> float:
    """Returns the mean launches of one of these layers of the target; 0 without any."""
    names = {f"layer_{layer}" for layer in layers}
    found = sum(not names.isdisjoint(path.split("/")) for path in paths)
    return found / len(layers) if layers else 0.0


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    return found, entry


def _walk(computations: dict[str, list[str]], name: str) -> Iterator[str]:
    for line in computations[name]:
        opcode = _opcode(line)
        if opcode in _FREE or opcode is None:
            continue
        if opcode == "conditional":
            branches = (list(_walk(computations, branch)) for branch in _branches(line))
            yield from min(branches, key=len)
        elif opcode == "while":
            yield from _walk(computations, _called(line, "body") or "")
        elif opcode == "call":
            yield from _walk(computations, _called(line, "to_apply") or "")
        else:
            path = re.search(r'op_name="([^"]*)"', line)
            yield path[1] if path else ""


def _opcode(line: str) -> str | None:
    found = _INSTRUCTION.match(line)
    return found[1] if found else None


def _called(line: str, role: str) -> str | None:
    found = re.search(rf"\b{role}=%([\w.-]+)", line)
    return found[1] if found else None


def _branches(line: str) -> list[str]:
    several = re.search(r"branch_computations=\{([^}]*)\}", line)
    if several:
        return re.findall(r"%([\w.-]+)", several[1])
    return re.findall(r"(?:true|false)_computation=%([\w.-]+)", line)
