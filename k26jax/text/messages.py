"""Chat messages of a request: checked, and brought to the one form that templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from k26jax.errors import RequestError, nearest
from k26jax.text.markers import THINK_CLOSE, THINK_OPEN
from k26jax.text.tokenizer import replace_surrogates
from k26jax.text.tool_ids import CallIds

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {
    "role",
    "content",
    "name",
    "reasoning_content",
    "reasoning",
    "tool_calls",
    "tool_call_id",
}
# What clients send back of an answer, or add for other servers; nothing of it reaches the model.
IGNORED_FIELDS = {"annotations", "audio", "cache_control", "id", "index", "refusal", "status"}
_TEXT_PARTS = ("text", "input_text", "output_text")


def check_messages(messages: Any) -> list[Message]:
    """Returns the messages in the form that templates read, as new objects.

    Each has `role` (developer becomes system) and `content`, a string: parts are joined, null and
    empty lists are "". An assistant's may have `reasoning_content`, a string, and `tool_calls`
    (id, type, function with name and arguments, a JSON string); a tool's has `tool_call_id`. Ids
    have Kimi's form `functions.name:index`, whatever a client or another provider made of them.

    Raises: RequestError that names the message and the field.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is a {type(messages).__name__}, expected a list of objects such as "
            '{"role": "user", "content": "Hello"}'
        )
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    checked = [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    _normalise_ids(checked)
    return checked


def count_calls(messages: Sequence[Message]) -> int:
    """Returns how many tool calls the checked messages hold; the next call's number."""
    return sum(len(message.get("tool_calls", ())) for message in messages)


def _message(where: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {message!r:.80}, expected an object with role and content")
    for field, value in message.items():
        if field not in _FIELDS and field not in IGNORED_FIELDS and value is not None:
            raise RequestError(
                f"{where} has the unknown field {field!r:.80}{nearest(str(field)[:80], _FIELDS)}"
            )
    role = message.get("role")
    if role not in ROLES:
        hint = "; send role tool with tool_call_id" if role == "function" else ""
        raise RequestError(
            f"{where}.role is {role!r:.80}, expected one of {', '.join(ROLES)}{hint}"
        )
    role = "system" if role == "developer" else role
    checked: Message = {"role": role, "content": _content(where, message.get("content"))}
    if message.get("name") is not None:
        checked["name"] = _string(f"{where}.name", message["name"])
        if not checked["name"]:
            del checked["name"]
    if role == "assistant":
        checked |= _assistant(where, message)
    elif message.get("tool_calls"):
        raise RequestError(f"{where} has tool_calls and the role {role}; only an assistant calls")
    if role == "tool":
        call = message.get("tool_call_id")
        if not isinstance(call, str) or not call:
            raise RequestError(
                f"{where}.tool_call_id is {call!r:.80}, expected the id of the call that this "
                "message answers"
            )
        checked["tool_call_id"] = replace_surrogates(call)
    return checked


def _assistant(where: str, message: Mapping[str, Any]) -> Message:
    found: Message = {}
    # K2.6 reads `reasoning` before `reasoning_content`.
    for field in ("reasoning", "reasoning_content"):
        value = message.get(field)
        if value is not None and "reasoning_content" not in found:
            found["reasoning_content"] = _string(f"{where}.{field}", value)
    if "reasoning_content" not in found:
        found |= _inline_thoughts(_content(where, message.get("content")))
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return found
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where}.tool_calls is {calls!r:.80}, expected a list of calls")
    found["tool_calls"] = [
        _call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)
    ]
    return found


def _inline_thoughts(content: str) -> Message:
    """Returns the two parts of an answer that begins with its thoughts in tags; {} for any other.

    That is how servers give it that do not split it, and no text begins like that by itself.
    """
    rest = content.lstrip()
    if not rest.startswith(THINK_OPEN) or THINK_CLOSE not in rest:
        return {}
    thoughts, _, answer = rest.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return {"reasoning_content": thoughts, "content": answer}


def _call(where: str, call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or call.get("type", "function") != "function":
        raise RequestError(f"{where} is {call!r:.80}, expected an object of type function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is {function!r:.80}, expected name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name is {name!r:.80}, expected a name")
    given, arguments = function.get("arguments"), "{}"
    if isinstance(given, Mapping):
        arguments = json.dumps(given, ensure_ascii=False)
    elif isinstance(given, str):
        arguments = given if given.strip() else "{}"
    elif given is not None:
        raise RequestError(
            f"{where}.function.arguments is {given!r:.80}, expected a string that holds JSON"
        )
    raw = call.get("id")
    if raw is not None and not isinstance(raw, str):
        raise RequestError(f"{where}.id is {raw!r:.80}, expected a string")
    return {
        "id": replace_surrogates(raw or ""),
        "type": "function",
        "function": {
            "name": replace_surrogates(name),
            "arguments": replace_surrogates(arguments),
        },
    }


def _content(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return replace_surrogates(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"{where}.content is {content!r:.80}, expected a string, a list of text parts, or null"
        )
    return "".join(_part(f"{where}.content[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return replace_surrogates(part)
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind is None:
        raise RequestError(f"{where} is {part!r:.80}, expected a text part")
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where} is of type {kind!r:.80}; only text parts are possible, as the model is run "
            "without its vision tower"
        )
    return _string(f"{where}.text", part.get("text"))


def _string(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} is {value!r:.80}, expected a string")
    return replace_surrogates(value)


def _normalise_ids(messages: list[Message]) -> None:
    """Gives calls and their answers ids of Kimi's form, in place."""
    ids = CallIds()
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = ids.from_history(call["id"], call["function"]["name"])
        if message["role"] == "tool":
            message["tool_call_id"] = ids.answered(message["tool_call_id"])
