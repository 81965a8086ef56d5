"""Tools that a request declares: checked, chosen, and matched with arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from k26jax.errors import RequestError, nearest
from k26jax.text.tokenizer import replace_surrogates
from k26jax.text.tool_ids import names_of

Tool = dict[str, Any]

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def check_tools(tools: Any) -> list[Tool]:
    """Returns the tools of a request with only what a template reads; none for null.

    Raises: RequestError that names the tool and the field.
    """
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools is {tools!r:.80}, expected a list of tools of type function")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{len(tools)} tools, at most {MAX_TOOLS} are possible; declare fewer")
    checked = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    names = names_of(checked)
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(
                f"tools[{index}] and tools[{names.index(name)}] are both called {name!r}; "
                "names must differ"
            )
    return checked


def choose_tools(tools: list[Tool], choice: Any) -> list[Tool]:
    """Returns the tools to render, which are those whose calls are read from the answer.

    Args:
        choice: the request's tool_choice. "none": no tools; nothing in the answer is a call then.
            Anything else: all.
    """
    return [] if choice == "none" else tools


def forced_tools(tools: list[Tool], choice: Any) -> list[Tool]:
    """Returns the tools of which the answer must call one; none where it is free.

    Args:
        choice: "required": any; {"type": "function", "function": {"name": ...}}: the named one.

    Raises: RequestError for a choice without its tool, and for one of another kind.
    """
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        if not tools:
            raise RequestError('tool_choice is "required", but there are no tools; send some')
        return tools
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping) or choice.get("type") != "function":
        raise RequestError(
            f'tool_choice is {choice!r:.80}, expected "auto", "none", "required" or '
            '{"type": "function", "function": {"name": ...}}'
        )
    name, names = function.get("name"), names_of(tools)
    if name not in names:
        raise RequestError(
            f"tool_choice names {name!r:.80}, which tools does not declare"
            f"{nearest(str(name)[:80], names)}"
        )
    return [tools[names.index(name)]]


def tool_for(arguments: str, tools: Sequence[Tool]) -> str | None:
    """Returns the name of the only tool whose parameters these arguments fit, or None."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    fitting = [tool["function"]["name"] for tool in tools if _fits(values, tool)]
    return fitting[0] if len(fitting) == 1 else None


def _fits(values: dict[str, Any], tool: Tool) -> bool:
    schema = tool["function"].get("parameters") or {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    if isinstance(required, list) and not all(name in values for name in required):
        return False
    if not schema.get("additionalProperties") and not all(name in properties for name in values):
        return False
    return all(_is_kind(value, properties.get(name)) for name, value in values.items())


def _is_kind(value: Any, schema: Any) -> bool:
    """Whether a value has the schema's type and is in its enumeration; no deeper rules."""
    if not isinstance(schema, Mapping):
        return True
    choices = schema.get("enum")
    if isinstance(choices, list) and value not in choices:
        return False
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    known = [kind for kind in kinds if kind in _KINDS]
    if not known or len(known) != len(kinds):
        return True
    if isinstance(value, bool):
        return "boolean" in known
    return any(isinstance(value, _KINDS[kind]) for kind in known)


def _tool(where: str, tool: Any) -> Tool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function" or not isinstance(tool, Mapping):
        raise RequestError(f"{where} is of type {kind!r:.80}; only the type function is possible")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name is {name!r:.80}, expected 1 to 256 letters, digits, dots, "
            "underscores or dashes"
        )
    assert isinstance(function, Mapping)
    kept: dict[str, Any] = {"name": name}
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None:
        if not isinstance(description, str):
            raise RequestError(f"{where}.function.description is no string")
        kept["description"] = replace_surrogates(description)
    if parameters is not None:
        if not isinstance(parameters, Mapping):
            raise RequestError(
                f"{where}.function.parameters is {parameters!r:.80}, expected a JSON Schema object"
            )
        kept["parameters"] = _copy(f"{where}.function.parameters", parameters)
    return {"type": "function", "function": kept}


def _copy(where: str, value: Any, depth: int = 0) -> Any:
    """Returns a JSON value without lone surrogates."""
    if depth > 64:
        raise RequestError(f"{where} is nested deeper than 64 levels")
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, Mapping):
        return {
            replace_surrogates(str(key)): _copy(where, item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_copy(where, item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise RequestError(f"{where} holds a {type(value).__name__}, which JSON has not")
