"""Tools as TypeScript declarations, the text in which Kimi K2.5 and K2.6 learnt to read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from k26jax.text.tools import Tool

_STEP = "  "
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_KINDS = {"string": str, "number": (int, float), "integer": int, "boolean": bool}


class _UnsupportedError(Exception):
    """A schema that has no TypeScript form in Kimi's encoder."""


def declare_tools(tools: Sequence[Tool]) -> str:
    """Returns the declarations of tools as Kimi's own tokenizer writes them.

    A schema that its encoder does not know turns the whole text into compact JSON, as there.
    """
    ordered = _sorted_keys(list(tools))
    try:
        functions = "\n".join(_function(tool["function"]) for tool in ordered)
    except _UnsupportedError:
        return json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value


class _Scope:
    """What the references of one function can name; knows whether one names the root."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.names_root = False

    def name(self, reference: Any) -> str:
        if reference == "#":
            self.names_root = True
            return "parameters"
        name = str(reference).removeprefix("#/$defs/")
        if name == str(reference) or name.rpartition("/")[2] not in self.definitions:
            raise _UnsupportedError(reference)
        return name.rpartition("/")[2]


def _function(function: dict[str, Any]) -> str:
    scope = _Scope()
    parameters = function.get("parameters") or {}
    body = _object(parameters, scope, "")
    lines = []
    if scope.names_root:
        fields = _fields(parameters, scope, _STEP)
        # In the order of their keys: unlike in an object, required ones do not come first.
        inner = ",\n".join(text for _, _, text in sorted(fields, key=lambda field: field[1]))
        lines.append(f"interface parameters {{\n{inner}\n}}")
        body = "parameters"
    for name, schema in list(scope.definitions.items()):
        if not isinstance(schema, dict):
            raise _UnsupportedError(schema)
        lines += _comment(schema.get("description"), "")
        lines.append(f"interface {name} {_type(schema, scope, '')}")
    lines += _comment(function.get("description"), "")
    lines.append(f"type {function['name']} = (_: {body}) => any;")
    return "\n".join(lines)


def _comment(text: Any, indent: str) -> list[str]:
    """Returns a description as comment lines; its empty lines stay empty."""
    if not text:
        return []
    return [f"{indent}// {line}" if line else "" for line in str(text).split("\n")]


def _notes(schema: Any, indent: str) -> list[str]:
    """Returns the comment lines above a field or an item: description, then limits."""
    if not isinstance(schema, dict) or "$ref" in schema:
        described = schema.get("description") if isinstance(schema, dict) else None
        return _comment(described, indent)
    lines = _comment(schema.get("description"), indent)
    kind = None if "anyOf" in schema or "enum" in schema else schema.get("type")
    limits = _LIMITS.get(kind, ()) if isinstance(kind, str) else ()
    given = ", ".join(f"{limit}: {schema[limit]}" for limit in limits if limit in schema)
    return [*lines, f"{indent}// {given}"] if given else lines


def _type(schema: Any, scope: _Scope, indent: str) -> str:
    """Returns the TypeScript type of a schema; lines after its first have the indent."""
    if schema is True or schema == {}:
        return "any"
    if schema is False:
        return "null"
    if not isinstance(schema, dict):
        raise _UnsupportedError(schema)
    if "$ref" in schema:
        return scope.name(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(item, scope, indent) for item in _list(schema["anyOf"]))
    if "enum" in schema:
        return _enum(schema)
    kind = schema.get("type")
    if isinstance(kind, list):
        if not all(isinstance(item, str) and item in _UNION for item in kind):
            raise _UnsupportedError(kind)
        return " | ".join(_UNION[item] for item in kind)
    if kind == "object":
        return _object(schema, scope, indent)
    if kind == "array":
        return _array(schema, scope, indent)
    if not isinstance(kind, str):
        raise _UnsupportedError(schema)
    return "number" if kind == "integer" else kind


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _UnsupportedError(value)
    return value


def _enum(schema: dict[str, Any]) -> str:
    values, kind = _list(schema["enum"]), schema.get("type")
    if isinstance(kind, list):
        kinds = [item for item in kind if item != "null"] if len(kind) == 2 else kind
        if len(kind) > 2 or len(kinds) > 1 or not kind:
            raise _UnsupportedError(kind)
        kind = kinds[0] if kinds else "null"
    expected = _ENUM_KINDS.get(kind) if isinstance(kind, str) else None
    if expected and not all(value is None or isinstance(value, expected) for value in values):
        raise _UnsupportedError(values)
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)


def _array(schema: dict[str, Any], scope: _Scope, indent: str) -> str:
    item = schema.get("items") or {}
    notes = _notes(item, indent + _STEP)
    if not notes:
        return f"Array<{_type(item, scope, indent)}>"
    inner = indent + _STEP
    return "\n".join(["Array<", *notes, f"{inner}{_type(item, scope, inner)}", f"{indent}>"])


def _object(schema: dict[str, Any], scope: _Scope, indent: str) -> str:
    inner = indent + _STEP
    definitions = schema.get("$defs")
    if isinstance(definitions, dict):
        scope.definitions.update(definitions)
    others = schema.get("additionalProperties")
    fields = [text for _, _, text in sorted(_fields(schema, scope, inner), key=lambda f: f[:2])]
    if others is not None:
        if not isinstance(others, bool | dict):
            raise _UnsupportedError(others)
        kind = "never" if others is False else _type(others, scope, inner)
        fields.append(f"{inner}[k: string]: {kind}")
    if not fields:
        return "{}"
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}"


def _fields(schema: dict[str, Any], scope: _Scope, indent: str) -> list[tuple[bool, str, str]]:
    """Returns (is optional, name, text) of every property."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise _UnsupportedError(properties)
    found = []
    for name, item in properties.items():
        optional = name not in _list(required)
        lines = _notes(item, indent)
        default = item.get("default") if isinstance(item, dict) else None
        if default is not None:
            is_plain = isinstance(default, bool | int | float)
            shown = repr(default) if is_plain else json.dumps(default, ensure_ascii=False)
            lines.append(f"{indent}// Default: {shown}")
        lines.append(f"{indent}{name}{'?' if optional else ''}: {_type(item, scope, indent)}")
        found.append((optional, name, "\n".join(lines)))
    return found
