"""Calls of tools as a grammar: forced, one at most, or in place of an answer of some shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from k26jax.errors import RequestError
from k26jax.text.chat import ChatPrompt
from k26jax.text.markers import THINK_CLOSE, Marker
from k26jax.text.structured import STRUCTURED, Structure, as_source, entry_of, is_plain, schema_of
from k26jax.text.tool_ids import call_id
from k26jax.text.tools import Tool, forced_tools

_INDEX = "/(0|[1-9][0-9]{0,3})/"


def chat_structure(
    prompt: ChatPrompt,
    structure: Structure | None,
    special_ids: Mapping[str, int],
    *,
    choice: Any = None,
    parallel: bool = True,
) -> Structure | None:
    """Returns the shape of a chat's answer; None where it is free.

    A forced call is all of the answer. Otherwise, what the request asks of the answer's shape does
    not keep it from calling its tools instead. Where the prompt leaves the thoughts open, the shape
    is that of what follows them.

    Args:
        structure: what the request asks for, checked.
        choice: its tool_choice.
        parallel: whether it may have several calls; a named tool is called once.

    Raises: RequestError for a choice that cannot be, and a structure that does not go with tools.
    """
    forced = forced_tools(prompt.tools, choice)
    found: dict[str, Any] | None = None
    if forced:
        several = parallel and not isinstance(choice, Mapping)
        found = {"grammar": _source(forced, prompt.calls, special_ids, several)}
    elif structure is not None and prompt.tools and "at" not in structure:
        _require_plain(structure)
        answer = entry_of(structure)
        found = {
            "grammar": _source(prompt.tools, prompt.calls, special_ids, parallel, answer),
        }
        if "after" in structure:
            found["after"] = structure["after"]
    elif structure is not None:
        found = dict(structure)
    elif prompt.tools and not parallel:
        found = {"grammar": _source(prompt.tools, prompt.calls, special_ids, several=False)}
        return found | {"at": Marker.SECTION_BEGIN.value}
    if found is not None and prompt.is_thinking and not {"after", "at"} & found.keys():
        found["after"] = THINK_CLOSE
    return found


def parameters_structures(tools: list[Tool], choice: Any) -> dict[str, Structure]:
    """Returns the shape of the arguments of each tool that may be called, by the field's name."""
    chosen = forced_tools(tools, choice) or tools
    return {
        f"tools[{index}].function.parameters": {"json": _parameters(tool)}
        for index, tool in enumerate(tools)
        if tool in chosen
    }


def _parameters(tool: Tool) -> Any:
    return tool["function"].get("parameters") or {"type": "object"}


def _require_plain(structure: Structure) -> None:
    if not is_plain(structure):
        raise RequestError(
            f"{STRUCTURED}.grammar is a set of grammars, which does not go with tools; send it "
            'in Lark\'s form, or tool_choice "none"'
        )


def _source(
    tools: Sequence[Tool],
    first: int,
    special_ids: Mapping[str, int],
    several: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Returns the grammar of a section of calls, or of an answer in its place.

    Args:
        first: number of the answer's first call in the conversation.
        several: whether more calls may follow it.
    """

    def token(marker: Marker) -> str:
        return f"<[{special_ids[marker.value]}]>"

    def call(index: int, tool: Tool, number: str) -> str:
        head = call_id(tool["function"]["name"], 0).removesuffix("0")
        return (
            f"{token(Marker.CALL_BEGIN)} {json.dumps(head)} {number} "
            f"{token(Marker.ARGUMENTS_BEGIN)} @arguments{index} {token(Marker.CALL_END)}"
        )

    numbers = {"first": json.dumps(str(first)), "more": _INDEX}
    rules = {
        name: " | ".join(call(index, tool, number) for index, tool in enumerate(tools))
        for name, number in numbers.items()
    }
    calls = "first more*" if several else "first"
    lines = [
        "start: calls" if answer is None else "start: calls | @answer",
        f"calls: {token(Marker.SECTION_BEGIN)} {calls} {token(Marker.SECTION_END)}",
        f"first: {rules['first']}",
    ]
    if several:
        lines.append(f"more: {rules['more']}")
    entries: dict[str, Mapping[str, Any]] = {"main": {"lark_grammar": "\n".join(lines)}}
    for index, tool in enumerate(tools):
        schema = schema_of(_parameters(tool), "tools")
        entries[f"arguments{index}"] = {"json_schema": schema}
    if answer is not None:
        entries["answer"] = answer
    return as_source(entries)
