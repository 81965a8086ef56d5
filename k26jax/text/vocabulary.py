"""What a tokenizer folder says, whichever file format it uses; knows nothing of encoding rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k26jax.errors import TokenizerError


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every id, and the two ways to turn text into ids.

    Fields:
        table: bytes of each id; control tokens hold their name, unused ids are empty.
        special_ids: name to id of every control token (never made from plain text).
        hidden_ids: the control tokens that visible text leaves out (the files' `special` flag).
        encode_plain: text to ids, control-token names being ordinary text.
        encode_marked: text to ids, control-token names becoming their ids.
    """

    table: list[bytes]
    special_ids: dict[str, int]
    hidden_ids: frozenset[int]
    encode_plain: Callable[[str], list[int]]
    encode_marked: Callable[[str], list[int]]


@dataclass(frozen=True)
class AddedToken:
    """One entry of `added_tokens_decoder`; `hidden` is its `special` flag."""

    id: int
    content: str
    hidden: bool


@dataclass(frozen=True)
class TokenizerSettings:
    """The parts of tokenizer_config.json that decide ids; absent names are None."""

    added_tokens: tuple[AddedToken, ...] = ()
    bos_token: str | None = None
    eos_token: str | None = None


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        TokenizerError: the file cannot be read or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TokenizerError(
            f"{path.name} cannot be read: {error}; copy it again from the model's repository"
        ) from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path.name} holds a {type(content).__name__}, expected an object")
    return content


def read_settings(path: Path) -> TokenizerSettings:
    """Returns what tokenizer_config.json says about control tokens.

    Raises:
        TokenizerError: an entry is malformed, or two entries share an id or a name.
    """
    content = read_json(path)
    entries = content.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise TokenizerError(f"{path.name}: added_tokens_decoder is not an object of id to token")
    added = tuple(_added_token(path.name, key, entry) for key, entry in entries.items())
    names, ids = {}, {}
    for token in added:
        if token.id in ids or token.content in names:
            other = ids.get(token.id) or names[token.content]
            raise TokenizerError(
                f"{path.name}: added tokens {other} and {token} share an id or a name; "
                "each must be unique"
            )
        ids[token.id] = names[token.content] = token
    return TokenizerSettings(
        added_tokens=added,
        bos_token=_token_name(path.name, content, "bos_token"),
        eos_token=_token_name(path.name, content, "eos_token"),
    )


def _added_token(file: str, key: str, entry: Any) -> AddedToken:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not (key.isascii() and key.isdigit()) or not isinstance(content, str) or not content:
        raise TokenizerError(
            f"{file}: added token {key!r}: {entry!r} is malformed; "
            'expected a decimal id and an object with a "content" string'
        )
    return AddedToken(int(key), content, bool(entry.get("special", True)))


def _token_name(file: str, content: dict[str, Any], field: str) -> str | None:
    value = content.get(field)
    name = value.get("content") if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise TokenizerError(f"{file}: {field} is {value!r}, expected a token's name or null")
    return name
