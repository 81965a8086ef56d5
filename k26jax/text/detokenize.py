"""Token ids to text while they are still arriving, in runs of any length."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from k26jax.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing list of ids, handed out as soon as its characters are whole.

    For every way of cutting a list of ids into runs, the pushed texts and the flushed one join
    to `tokenizer.decode` of the whole list: a token may hold part of a character, so its bytes
    wait until the character is complete or proves invalid (then U+FFFD, as in bytes.decode).

    Cost: proportional to the new ids; at most three bytes are kept.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these ids complete; unknown ids add nothing."""
        return self._decoder.decode(
            self._tokenizer.visible_bytes(ids, skip_special_tokens=self._skip_special_tokens)
        )

    def flush(self) -> str:
        """Returns what an unfinished character leaves at the end: U+FFFD or nothing.

        The detokenizer is then as new.
        """
        return self._decoder.decode(b"", final=True)
