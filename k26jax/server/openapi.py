"""The OpenAPI document: bodies with what the table of fields says of them, errors, media types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fastapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from k26jax.server.fields import CHAT, COMPLETION, HONOURED, IGNORED

_SCHEMAS = "#/components/schemas/"
_TEXT, _OBJECT = {"type": "string"}, {"type": "object"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [_TEXT, {"type": "array", "items": _OBJECT}, {"type": "null"}],
            },
            "reasoning_content": {"type": ["string", "null"]},
            "tool_calls": {"anyOf": [{"type": "array", "items": _OBJECT}, {"type": "null"}]},
            "tool_call_id": {"type": ["string", "null"]},
            "name": {"type": ["string", "null"]},
        },
    },
}
# Fields without a type in the models, as their values are checked where they are read.
_SHAPES: dict[str, dict[str, Any]] = {
    "messages": _MESSAGES,
    "tools": {"type": ["array", "null"], "items": _OBJECT},
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", None]}, _OBJECT]},
    "response_format": {"type": ["object", "null"]},
    "structured_outputs": {"type": ["object", "null"]},
    "thinking": {"type": ["object", "null"]},
    "chat_template_kwargs": {"type": ["object", "null"]},
    "reasoning_effort": {"type": ["string", "null"]},
}
_REQUIRED = {CHAT: "messages", COMPLETION: "prompt"}
_MEDIA = {"/metrics": ("text/plain",)}
_MAY_BE_503 = ("/health", "/ready")


def describe(
    app: fastapi.FastAPI, bodies: Mapping[str, type[BaseModel]], kinds: Mapping[str, str]
) -> None:
    """Completes the document of an application.

    Args:
        bodies: by path, the model of what is posted there.
        kinds: by path, which kind of request its table of fields is for.
    """
    document = app.openapi()  # kept by the application, and changed here
    _, models = models_json_schema(
        [(model, "validation") for model in bodies.values()], ref_template=_SCHEMAS + "{model}"
    )
    schemas: dict[str, Any] = models["$defs"] | {"Error": _ERROR}
    document["components"] = {"schemas": schemas}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _answers(path, operation, streams=path in kinds)
            if "{name}" in path:
                name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
                operation["parameters"] = [name]
            if path in bodies:
                name = bodies[path].__name__
                content = _json({"$ref": _SCHEMAS + name})
                operation["requestBody"] = {"content": content, "required": True}
                _complete(schemas[name], kinds.get(path))


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _answers(path: str, operation: dict[str, Any], *, streams: bool) -> None:
    """Tells the media types of an answer, and that all others are an error's object."""
    media = _MEDIA.get(path, ("application/json",)) + (("text/event-stream",) if streams else ())
    operation["responses"] = {
        "200": {"description": "An answer", "content": {kind: {"schema": {}} for kind in media}},
        "default": {"description": "An error", "content": _json({"$ref": _SCHEMAS + "Error"})},
    }
    if path in _MAY_BE_503:
        operation["responses"]["503"] = {"description": "Not now", "content": _json(_OBJECT)}


def _complete(schema: dict[str, Any], kind: str | None) -> None:
    """Adds what the models do not say: shapes, and the words of the table of fields."""
    fields = schema["properties"]
    for name in fields:
        fields[name] |= _SHAPES.get(name, {})
    if kind is not None:
        for name, what in HONOURED[kind].items():
            fields[name]["description"] = what
        fields |= {name: {"description": "ignored"} for name in IGNORED}
        schema["required"] = [_REQUIRED[kind]]
        needed = fields[_REQUIRED[kind]]
        needed.pop("default", None)
        if "anyOf" in needed:
            needed["anyOf"].remove({"type": "null"})
