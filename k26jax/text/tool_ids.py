"""Ids of tool calls: Kimi's form `functions.name:index`, and what clients and models make of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CANONICAL = re.compile(r"functions\.(?P<name>[\w.-]+):(?P<index>\d{1,9})", re.ASCII)
_NAMED = re.compile(r"(?P<name>\S+):(?P<index>\d{1,9})", re.ASCII)
_SEPARATORS = re.compile(r"[^0-9A-Za-z]")


def call_id(name: str, index: int) -> str:
    """Returns the id of a call in Kimi's form."""
    return f"functions.{name}:{index}"


def resolve(text: str, names: Iterable[str]) -> tuple[str, int | None] | None:
    """Returns (name of the tool, index or None) that an id stands for; None if it names no tool.

    Takes, in this order, and the longest declared name first: `functions.name:3` and `name:3` of
    a declared tool; `functions.name:3` with any name, as the model may call what was not declared;
    `functions_name_3` and the like, as clients keep only letters, digits, `_` and `-`;
    `functionsname3`, where separators were taken out.
    """
    text = text.strip()
    declared = sorted(set(names), key=lambda name: (-len(name), name))
    exact, named = _CANONICAL.fullmatch(text), _NAMED.fullmatch(text)
    for match in (exact, named):
        if match and match["name"] in declared:
            return match["name"], int(match["index"])
    if exact:
        return exact["name"], int(exact["index"])
    for name in declared:
        # A name of another separator than its declaration's is the third form too.
        pattern = _SEPARATORS.sub("[^0-9A-Za-z]", name)
        match = re.fullmatch(rf"(?:functions[._:-])?{pattern}(?:[:._-](\d{{1,9}}))?", text)
        if match:
            return name, _number(match[1])
    bare = _SEPARATORS.sub("", text) if not re.search(r"\s", text) else ""
    matches = [(name, match) for name in declared if (match := _squeezed(name).fullmatch(bare))]
    longest = [item for item in matches if len(item[1][1]) == len(matches[0][1][1])]
    if len(longest) != 1:
        return None
    name, match = longest[0]
    return name, _number(match[2])


def _squeezed(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?:functions)?({_SEPARATORS.sub('', name)})(\d{{1,9}})?")


def _number(digits: str | None) -> int | None:
    return int(digits) if digits else None


class CallIds:
    """Hands out ids of Kimi's form along a conversation.

    Args:
        made: calls that the conversation holds already; foreign ids are numbered on from there.
    """

    def __init__(self, made: int = 0):
        self._made = made
        self._used: set[str] = set()
        self._renamed: dict[str, str] = {}

    def from_history(self, raw: str, name: str) -> str:
        """Returns the id of a call that a client sent back with its name.

        An index that can be read from it stays, so that a prompt repeats what the model wrote.
        """
        found = resolve(raw, [name])
        index = found[1] if found and found[0] == name else None
        known = call_id(name, index) if index is not None else self._free(name)
        self._made += 1
        self._used.add(known)
        self._renamed[raw] = self._renamed[_SEPARATORS.sub("", raw)] = known
        return known

    def answered(self, raw: str) -> str:
        """Returns the id of the call that a tool's message answers; an unknown one as it is."""
        return self._renamed.get(raw) or self._renamed.get(_SEPARATORS.sub("", raw)) or raw

    def from_model(self, name: str, index: int | None) -> str:
        """Returns the id of a call that the model makes; no two of one answer are the same."""
        known = call_id(name, index) if index is not None else self._free(name)
        if known in self._used:
            known = self._free(name)
        self._made += 1
        self._used.add(known)
        return known

    def _free(self, name: str) -> str:
        index = self._made
        while call_id(name, index) in self._used:
            index += 1
        return call_id(name, index)


def names_of(tools: Sequence[dict]) -> list[str]:
    """Returns the names of checked tools."""
    return [tool["function"]["name"] for tool in tools]
