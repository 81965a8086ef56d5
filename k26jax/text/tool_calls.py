"""Kimi's calls of tools, read while they arrive: a state machine over markers and text.

<|tool_calls_section_begin|>
  <|tool_call_begin|> id <|tool_call_argument_begin|> arguments <|tool_call_end|> ...
<|tool_calls_section_end|>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from k26jax.text.events import (
    ContentDelta,
    Event,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    UnreadableCall,
)
from k26jax.text.markers import THINK_MARKERS, Marker
from k26jax.text.reader import Piece
from k26jax.text.tool_ids import CallIds, names_of, resolve
from k26jax.text.tools import Tool, tool_for


class _State(Enum):
    """Where the reader is: in plain text, between calls, in an id, in arguments."""

    TEXT = 0
    BETWEEN = 1
    ID = 2
    ARGUMENTS = 3


class ToolCallReader:
    """Turns the answer's pieces, thoughts aside, into content and calls.

    Every character that is no marker comes out, as content or in a call; only white space around
    calls does not. A call is announced when its id is complete and names a tool. One whose id names
    none waits for its arguments: if they fit one declared tool alone it is that tool's, else its
    text is content and an `UnreadableCall` tells. Structure that is out of place is taken as it is
    meant: a call without a section is a call, and whatever begins ends what was before it.

    Args:
        tools: the declared tools, at least one.
        calls: tool calls that the conversation holds; the number of the next one.
    """

    def __init__(self, tools: Sequence[Tool], calls: int = 0):
        self._tools, self._names = tools, names_of(tools)
        self._ids = CallIds(calls)
        self._state = _State.TEXT
        self._count = 0
        self._all_complete = True
        self._clear()

    def _clear(self) -> None:
        """Forgets what was collected of a call, or between two."""
        self._id_parts: list[str] = []
        self._parts: list[str] = []  # of arguments, or of space between calls
        self._id_tokens: list[int] = []
        self._tokens: list[int] = []  # of parts that wait
        self._is_named = self._is_prose = False

    @property
    def is_inside(self) -> bool:
        """Whether what comes next belongs to a section of calls."""
        return self._state is not _State.TEXT

    @property
    def calls_finish(self) -> bool:
        """Whether there are calls and all of them may be acted on."""
        return self._count > 0 and self._all_complete

    def push(self, piece: Piece) -> Iterator[Event]:
        """Yields the events of a piece."""
        marker = piece.marker
        if piece.is_spelled and not self._takes_spelled(marker):
            marker = None
        if marker in THINK_MARKERS:
            # In arguments, tags are what the model writes there; elsewhere they have no meaning.
            if self._state not in (_State.ARGUMENTS, _State.ID):
                return
            piece, marker = Piece(marker.value, piece.tokens), None
        if marker is None:
            yield from self._add_text(piece)
        else:
            yield from self._on_marker[marker](self)

    def end(self, *, is_cut: bool) -> Iterator[Event]:
        """Yields what the end of the answer leaves.

        Args:
            is_cut: the answer was cut off, so the last call, if open, cannot be relied on.
        """
        if self._state is _State.ID:
            # Half an id may read like the id of another tool, so here it must be whole.
            whole = "".join(self._id_parts).strip()
            found = resolve(whole, self._names) if whole.startswith("functions.") else None
            if found and found[0] in self._names and found[1] is not None:
                yield self._start(*found)
                yield from self._close(is_cut=is_cut)
            else:
                yield from self._give_up()
        elif self._state is _State.ARGUMENTS:
            yield from self._close(is_cut=is_cut)
        self._state = _State.TEXT
        self._clear()

    def _takes_spelled(self, marker: Marker | None) -> bool:
        expected = _State.TEXT if marker is Marker.SECTION_BEGIN else _State.BETWEEN
        return self._state is expected

    def _add_text(self, piece: Piece) -> Iterator[Event]:
        if self._state is _State.TEXT:
            yield ContentDelta(piece.text, piece.tokens)
            return
        if self._state is _State.ARGUMENTS and self._is_named:
            self._parts.append(piece.text)
            yield ToolCallArguments(self._count - 1, piece.text, piece.tokens)
            return
        if self._state is _State.ID:
            self._id_parts.append(piece.text)
            self._id_tokens += piece.tokens
            return
        self._parts.append(piece.text)
        self._tokens += piece.tokens
        if self._state is _State.BETWEEN and (self._is_prose or piece.text.strip()):
            yield ContentDelta("".join(self._parts), tuple(self._tokens))
            self._clear()
            self._is_prose = True

    def _begin_section(self) -> Iterator[Event]:
        yield from self._leave_call()
        self._state = _State.BETWEEN

    def _end_section(self) -> Iterator[Event]:
        yield from self._leave_call()
        self._state = _State.TEXT

    def _begin_call(self) -> Iterator[Event]:
        yield from self._leave_call()
        self._state = _State.ID

    def _begin_arguments(self) -> Iterator[Event]:
        if self._state is not _State.ID:
            return
        self._state = _State.ARGUMENTS
        found = resolve("".join(self._id_parts), self._names)
        if found:
            yield self._start(*found)

    def _end_call(self) -> Iterator[Event]:
        if self._state is _State.ID:
            self._split_id()
            yield from self._begin_arguments()
            yield from self._flush_arguments()
        if self._state is _State.ARGUMENTS:
            yield from self._close(is_closed=True)
            self._state = _State.BETWEEN

    def _split_id(self) -> None:
        """Takes arguments that follow the id without their marker out of it."""
        text = "".join(self._id_parts)
        place = text.find("{")
        if place >= 0:
            self._id_parts, self._parts = [text[:place]], [text[place:]]

    def _flush_arguments(self) -> Iterator[Event]:
        if self._is_named and self._parts:
            yield ToolCallArguments(self._count - 1, "".join(self._parts), tuple(self._tokens))

    def _leave_call(self) -> Iterator[Event]:
        """Yields the end of what a marker interrupts."""
        if self._state is _State.ID:
            yield from self._give_up()
        elif self._state is _State.ARGUMENTS:
            yield from self._close()
        self._clear()

    def _start(self, name: str, index: int | None) -> ToolCallStart:
        self._count += 1
        self._is_named = True
        return ToolCallStart(self._count - 1, self._ids.from_model(name, index), name)

    def _close(self, *, is_closed: bool = False, is_cut: bool = False) -> Iterator[Event]:
        """Yields the end of the call at hand, after all of it if it was not announced yet.

        Args:
            is_closed: the model closed it; otherwise JSON that is whole tells that it is.
        """
        arguments = "".join(self._parts)
        if not self._is_named:
            name = None if is_cut else tool_for(arguments, self._tools)
            if name is None:
                yield from self._give_up()
                return
            yield self._start(name, None)
            yield from self._flush_arguments()
        is_complete = not is_cut and (is_closed or _is_json(arguments))
        if is_closed and not arguments.strip():
            yield ToolCallArguments(self._count - 1, "{}")
        self._all_complete &= is_complete
        yield ToolCallEnd(self._count - 1, is_complete)
        self._clear()

    def _give_up(self) -> Iterator[Event]:
        """Yields a call that names no tool as the text that it is."""
        id_text = "".join(self._id_parts)
        text = id_text + "".join(self._parts)
        if text:
            yield ContentDelta(text, tuple(self._id_tokens + self._tokens))
        yield UnreadableCall(id_text)
        self._clear()

    _on_marker: dict[Marker, Callable[[ToolCallReader], Iterator[Event]]] = {  # noqa: RUF012
        Marker.SECTION_BEGIN: _begin_section,
        Marker.SECTION_END: _end_section,
        Marker.CALL_BEGIN: _begin_call,
        Marker.ARGUMENTS_BEGIN: _begin_arguments,
        Marker.CALL_END: _end_call,
    }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
