"""Keeps what a user wrote from becoming control tokens, on its way through a folder's template.

A template gives one string, in which its own `<|im_end|>` and one that a user typed look alike. So
before rendering, the characters of which names of control tokens are made are replaced in all that
comes from the request, one by one, by characters that occur nowhere; afterwards the names still
there are the template's, and the characters are put back into the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from k26jax.errors import RequestError

_ONE_WORD = re.compile(r"[\W_]?(?P<word>[^\W_]+)[\W_]?")
# What templates ask messages and tools for, and so no name that a user chose.
_PROTOCOL = {
    *("arguments", "content", "description", "function", "id", "name", "parameters", "properties"),
    *("reasoning_content", "required", "role", "tool_call_id", "tool_calls", "type"),
}
_PRIVATE = (*range(0xF0000, 0xFFFFE), *range(0xE000, 0xF900))


class Mask:
    """Replaces characters of the request so that it cannot write a control token's name.

    Replaced are all characters of the names but letters, digits and white space, and the first
    letter of each word that makes a name when brackets are put around it ("think"). The lengths of
    texts, their letters and their white space stay, so templates can strip and compare as ever.

    Left is what no template does: writing some letters of such a word around a user's.

    Args:
        names: the control tokens.
        values: all that the request brings into the template, and the template itself; what
            replaces characters occurs in none of them.
    """

    def __init__(self, names: Iterable[str], values: Iterable[Any]):
        names = [name for name in names if name]
        marks = {char for name in names for char in name if not char.isalnum() and char.strip()}
        words = {match["word"] for name in names if (match := _ONE_WORD.fullmatch(name))}
        self._edges = {char for name in names for char in (name[0], name[-1])} & marks
        self._words = words
        originals = sorted(marks | {word[0] for word in words})
        taken = {char for value in values for text in _texts(value) for char in text}
        free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
        try:
            self._replace = {char: next(free) for char in originals}
        except StopIteration:
            raise RequestError(
                "the request uses nearly all private characters of Unicode; send fewer"
            ) from None
        self._restore = str.maketrans({new: old for old, new in self._replace.items()})
        self._restore_escaped = {_escaped(new): _escaped(old) for old, new in self._replace.items()}
        parts = [re.escape(char) for char in sorted(marks)]
        parts += [f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in sorted(words)]
        self._pattern = re.compile("|".join(parts) or r"(?!)")

    def hide(self, value: Any) -> Any:
        """Returns a JSON value with its texts replaced; keys only where they could be names."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._replace[match[0]], value)
        if isinstance(value, Mapping):
            return {self._key(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """Returns a text with its own characters, also where a template escaped them as JSON."""
        if "\\u" in text:
            for new, old in self._restore_escaped.items():
                text = text.replace(new, old)
        return text.translate(self._restore)

    def _key(self, key: Any) -> Any:
        is_free = not isinstance(key, str) or key in _PROTOCOL
        if is_free or (key not in self._words and self._edges.isdisjoint(key)):
            return key
        return self.hide(key)


def _escaped(char: str) -> str:
    """Returns a character as JSON in ASCII has it."""
    return json.dumps(char)[1:-1]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
