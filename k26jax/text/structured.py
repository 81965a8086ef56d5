"""What shape an answer is asked to have: checked, and written as a grammar of llguidance.

A request says it as vLLM's clients do: {"json": schema}, {"json_object": true}, {"regex": text},
{"choice": [texts]} or {"grammar": text in Lark's or GBNF form}. One of two further keys, the name
of a control token, says where the grammar begins: "after" it (the answer is free up to there and
does not end before), or "at" it, wherever that token comes (without it the answer stays free).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from k26jax.errors import RequestError, nearest

STRUCTURED = "structured_outputs"
KINDS = ("json", "json_object", "regex", "choice", "grammar")
BEGINNINGS = ("after", "at")
MAX_CHOICES = 1024
MAX_TEXT_CHARS = 1 << 16
MAX_SOURCE_CHARS = 1 << 20
_FORMATS = ("text", "json_object", "json_schema")
# Between JSON's tokens: a space, or a new line and its indentation. Without a bound, models that
# are not sure of the schema write white space up to their limit.
_WHITE_SPACE = r" |\r?\n[ \t]{0,32}"

Structure = Mapping[str, Any]


def check_structure(value: Any, where: str = STRUCTURED) -> None:
    """Raises RequestError unless a value asks for one shape of the answer; null asks for none."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is {value!r:.80}, expected an object with {_one_of(KINDS)}")
    for name in value:
        if name not in KINDS + BEGINNINGS:
            raise RequestError(f"{where}.{name} is unknown{nearest(str(name)[:80], KINDS)}")
    for names, least in ((KINDS, 1), (BEGINNINGS, 0)):
        given = [name for name in names if name in value]
        if not least <= len(given) <= 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"{where} has {found} of {', '.join(names)}, expected one")
    for name in (*BEGINNINGS, "regex", "grammar"):
        if name in value and (not isinstance(value[name], str) or not value[name]):
            raise RequestError(f"{where}.{name} is {value[name]!r:.80}, expected text")
        if len(value.get(name, "")) > MAX_TEXT_CHARS and not _is_set(value[name]):
            raise RequestError(
                f"{where}.{name} has {len(value[name])} characters, at most {MAX_TEXT_CHARS}"
            )
    if value.get("json_object", True) is not True:
        raise RequestError(f"{where}.json_object is {value['json_object']!r:.80}, expected true")
    if "choice" in value:
        _check_choice(value["choice"], where)
    if "json" in value:
        schema_of(value["json"], f"{where}.json")


def _check_choice(choice: Any, where: str) -> None:
    is_list = isinstance(choice, list | tuple) and 0 < len(choice) <= MAX_CHOICES
    if not is_list or not all(isinstance(item, str) and item for item in choice):
        raise RequestError(
            f"{where}.choice is {choice!r:.80}, expected a list of 1 to {MAX_CHOICES} texts"
        )


def schema_of(value: Any, where: str) -> dict[str, Any]:
    """Returns a JSON schema, given as an object or as its text, with bounded white space.

    Raises: RequestError for anything else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is text that is no JSON: {error}") from None
    if value is True:
        value = {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is {value!r:.80}, expected a JSON schema, an object")
    return {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}} | dict(value)


def entry_of(structure: Structure) -> dict[str, Any]:
    """Returns a checked structure as one grammar of llguidance, without its name."""
    if "json" in structure:
        return {"json_schema": schema_of(structure["json"], f"{STRUCTURED}.json")}
    if "json_object" in structure:
        return {"json_schema": schema_of({"type": "object"}, STRUCTURED)}
    if "regex" in structure:
        return {"lark_grammar": f"start: /{_lark_pattern(structure['regex'])}/"}
    if "choice" in structure:
        words = " | ".join(json.dumps(item, ensure_ascii=False) for item in structure["choice"])
        return {"lark_grammar": f"start: {words}"}
    return {"lark_grammar": _as_lark(structure["grammar"])}


def source_of(structure: Structure, where: str = STRUCTURED) -> str:
    """Returns the text that llguidance compiles for a checked structure.

    Raises: RequestError for one that cannot be written, or is too long.
    """
    grammar = structure.get("grammar", "")
    if _is_set(grammar):
        source = grammar
        _refuse_half_pairs(source, where)
    else:
        source = as_source({"main": entry_of(structure)}, where)
    if len(source) > MAX_SOURCE_CHARS:
        raise RequestError(
            f"{where}: {len(source)} characters of schemas, at most {MAX_SOURCE_CHARS}"
        )
    return source


def as_source(entries: Mapping[str, Mapping[str, Any]], where: str = STRUCTURED) -> str:
    """Returns named grammars as one text; the first is the whole, `@name` in it another."""
    grammars = [{"name": name, **entry} for name, entry in entries.items()]
    try:
        # Unescaped, to tell half a surrogate pair from the letters of its escape in a pattern.
        _refuse_half_pairs(json.dumps({"grammars": grammars}, ensure_ascii=False), where)
        return json.dumps({"grammars": grammars})
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} holds what JSON has not: {error}") from None


def _refuse_half_pairs(source: str, where: str) -> None:
    """Raises RequestError for half of a surrogate pair, which the library cannot be handed."""
    half = next((char for char in source if 0xD800 <= ord(char) <= 0xDFFF), None)
    if half is not None:
        raise RequestError(
            f"{where} holds {half!r}, half of a surrogate pair, which cannot occur in any text; "
            "send the whole character"
        )


def is_plain(structure: Structure) -> bool:
    """Whether a structure is one grammar, which can be part of another."""
    return not _is_set(structure.get("grammar", ""))


def _is_set(grammar: str) -> bool:
    """Whether a grammar is llguidance's own form, an object with several."""
    return grammar.lstrip().startswith("{")


def _as_lark(grammar: str) -> str:
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises plain Exception for what it cannot read
        raise RequestError(f"{STRUCTURED}.grammar: {error!s:.200}") from None


def response_structure(value: Any) -> dict[str, Any] | None:
    """Returns what an OpenAI response_format asks for; None for plain text.

    A schema holds whether it is called strict or not.

    Raises: RequestError that names the part.
    """
    where = "response_format"
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.get("type") not in _FORMATS:
        raise RequestError(
            f"{where} is {value!r:.80}, expected an object whose type is {_one_of(_FORMATS)}"
        )
    if value["type"] == "text":
        return None
    if value["type"] == "json_object":
        return {"json_object": True}
    given = value.get("json_schema")
    if not isinstance(given, Mapping) or "schema" not in given:
        raise RequestError(
            f"{where}.json_schema is {given!r:.80}, expected an object with name and schema"
        )
    schema_of(given["schema"], f"{where}.json_schema.schema")
    return {"json": given["schema"]}


def _lark_pattern(pattern: str) -> str:
    """Returns a regular expression as it stands between Lark's slashes."""
    shown, is_escaped = [], False
    for char in pattern:
        if char == "/" and not is_escaped:
            shown.append("\\/")
        else:
            shown.append("\\n" if char == "\n" else char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(shown)


def _one_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
