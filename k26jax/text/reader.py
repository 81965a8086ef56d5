"""Token ids to pieces of an answer's text, up to its end, however the ids come in runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from k26jax.text.detokenize import Detokenizer
from k26jax.text.markers import Marker
from k26jax.text.stop import StopMatcher
from k26jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """Text that is final, or one marker.

    Fields:
        text: what is added to the text of a plain completion; a marker's is its name, or nothing
            where the tokenizer hides it.
        tokens: positions in the answer, from 0, of the tokens that begin in this text.
        marker: what the piece is if it is no text.
        is_spelled: the marker was written in letters; where it has no sense it is text.
    """

    text: str
    tokens: tuple[int, ...] = ()
    marker: Marker | None = None
    is_spelled: bool = False


@dataclass(frozen=True)
class _Mark:
    """A marker's token: where its text begins and ends in the answer's, and its position."""

    start: int
    end: int
    marker: Marker
    token: int


class OutputReader:
    """Reads the tokens of one answer until a stop string, a stop id or the limit ends it.

    Stop strings are searched for in the whole text, markers included as far as the tokenizer shows
    them; one that ends within a marker's name takes the marker away. A stop string that is the name
    of a hidden control token ends the answer at that token.

    Args:
        tokenizer: None for a model without one; then there is no text.
        max_tokens: the answer's limit.
        min_tokens: stop strings are looked for in the text after that many tokens.
        stop_ids: ids that end it; own_stop_ids: those of them that the request named.
        markers: ids to hand out as markers; none for plain completions.
        spelled: words in the text to hand out as markers too.

    Attributes:
        token_ids: everything read, the stop token included.
        starts: by position of a token with text, the first character of the answer's text, markers
            shown, that it has a part in.
        finish_reason: "stop" or "length", None before the end.
        stop_reason: the stop string or the own stop id that ended it, else None.

    Raises: RequestError for bad stop strings, as `StopMatcher`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
        own_stop_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        markers: Mapping[int, Marker] | None = None,
        spelled: Mapping[str, Marker] | None = None,
    ):
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.starts: dict[int, int] = {}
        self._tokenizer, self._max_tokens, self._min_tokens = tokenizer, max_tokens, min_tokens
        self._stop_ids, self._own_stop_ids = frozenset(stop_ids), frozenset(own_stop_ids)
        self._include_stop, self._skips = include_stop, skip_special_tokens
        self._markers, self._spelled = markers or {}, spelled or {}
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens) if tokenizer else None
        self._matcher = StopMatcher(stop, include_stop)
        self._hidden_stops = self._names_of_hidden(stop)
        self._read_chars = 0  # of the whole text, held ones included
        self._out_chars = 0  # handed out in pieces
        self._ready = ""  # past the stop matcher, not yet handed out
        self._marks: deque[_Mark] = deque()
        self._starts: deque[int] = deque()  # positions of tokens not yet handed out

    def push(self, token_ids: Sequence[int]) -> list[Piece]:
        """Returns the pieces that these tokens add; those after the end are not read.

        Tokens go one by one, so where they were cut into runs changes nothing.
        """
        pieces: list[Piece] = []
        for token in token_ids:
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            self._read(token)
            pieces += self._pieces()
        return pieces

    def end(self, reason: str) -> list[Piece]:
        """Ends an answer that goes on, for a reason from outside; returns what was held back."""
        if self.finish_reason is not None:
            return []
        self._end(reason, None)
        return list(self._pieces())

    def _names_of_hidden(self, stop: Sequence[str]) -> dict[int, str]:
        # A request has a few stop strings; a tokenizer's control tokens are looked up by name.
        if self._tokenizer is None or not self._skips or not stop:
            return {}
        ids = self._tokenizer.special_ids
        return {
            ids[text]: text for text in stop if text in ids and self._tokenizer.is_hidden(ids[text])
        }

    def _read(self, token: int) -> None:
        is_stop = token in self._stop_ids
        is_hidden_stop = self._is_stoppable and token in self._hidden_stops
        if self._detokenizer and (self._include_stop or not (is_stop or is_hidden_stop)):
            self._read_text(token, is_hidden_stop)
        if self.finish_reason is not None:
            return
        if is_hidden_stop:
            self._end("stop", self._hidden_stops[token])
        elif is_stop:
            self._end("stop", token if token in self._own_stop_ids else None)
        elif len(self.token_ids) >= self._max_tokens:
            self._end("length", None)

    def _read_text(self, token: int, is_hidden_stop: bool) -> None:
        assert self._detokenizer is not None
        assert self._tokenizer is not None
        marker = self._markers.get(token)
        if is_hidden_stop or marker:
            self._match(self._detokenizer.flush())
        if self.finish_reason is not None:
            return
        position, start = len(self.token_ids) - 1, self._read_chars
        text = self._hidden_stops[token] if is_hidden_stop else self._detokenizer.push([token])
        if marker:
            self._marks.append(_Mark(start, start + len(text), marker, position))
        elif text or self._tokenizer.visible_bytes([token], skip_special_tokens=self._skips):
            self._starts.append(position)
            self.starts[position] = start
        self._match(text)

    def _end(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer:
            self._match(self._detokenizer.flush())
        self._show(self._matcher.flush())

    @property
    def _is_stoppable(self) -> bool:
        """Whether the newest token may complete a stop string."""
        return len(self.token_ids) > self._min_tokens

    def _match(self, text: str) -> None:
        self._read_chars += len(text)
        self._show(self._matcher.push(text) if self._is_stoppable else (text, None))

    def _show(self, found: tuple[str, str | None]) -> None:
        shown, matched = found
        self._ready += shown
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched

    def _pieces(self) -> Iterator[Piece]:
        """Yields what is final of the ready text, cut at markers."""
        shown = self._out_chars + len(self._ready)
        while self._marks and self._marks[0].end <= shown:
            mark = self._marks.popleft()
            yield from self._texts(mark.start, is_closed=True)
            yield Piece(self._take(mark.end), (mark.token,), mark.marker)
        limit = min(shown, self._marks[0].start) if self._marks else shown
        is_over = self.finish_reason is not None
        yield from self._texts(limit, is_closed=is_over or limit < shown)
        if is_over:
            self._ready = ""

    def _texts(self, limit: int, *, is_closed: bool) -> Iterator[Piece]:
        """Yields the ready text up to a limit; words that are markers one by one.

        Args:
            is_closed: nothing can be added to the text at the limit.
        """
        while self._spelled and self._out_chars < limit:
            text = self._ready[: limit - self._out_chars]
            found = [(text.find(word), word) for word in self._spelled if word in text]
            if not found:
                break
            start, word = min(found)
            if start:
                yield self._text(self._out_chars + start)
            end = self._out_chars + len(word)
            piece = self._text(end)
            yield Piece(piece.text, piece.tokens, self._spelled[word], is_spelled=True)
        if not is_closed:
            limit -= _open_chars(self._ready[: limit - self._out_chars], self._spelled)
        if limit > self._out_chars:
            yield self._text(limit)

    def _text(self, limit: int) -> Piece:
        tokens = []
        while self._starts and self.starts[self._starts[0]] < limit:
            tokens.append(self._starts.popleft())
        return Piece(self._take(limit), tuple(tokens))

    def _take(self, limit: int) -> str:
        count = limit - self._out_chars
        text, self._ready = self._ready[:count], self._ready[count:]
        self._out_chars = limit
        return text


def _open_chars(text: str, words: Mapping[str, Marker]) -> int:
    """Returns how many characters at the end of a text begin one of the words."""
    longest = max(map(len, words), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(word.startswith(text[-count:]) for word in words):
            return count
    return 0
