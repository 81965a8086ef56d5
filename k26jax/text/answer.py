"""Token ids of an answer to the events of a chat, the one road of server, batch and Python API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from k26jax.text.chat import ChatPrompt
from k26jax.text.events import (
    ChatMessage,
    ContentDelta,
    Event,
    Finish,
    ReasoningDelta,
    Usage,
    merge_deltas,
)
from k26jax.text.markers import SPELLED, markers_of
from k26jax.text.reader import OutputReader, Piece
from k26jax.text.reasoning import ReasoningSplitter
from k26jax.text.tokenizer import Tokenizer
from k26jax.text.tool_calls import ToolCallReader


class ChatAnswer:
    """Reads one answer, run by run of accepted tokens.

    For every way of cutting the tokens into runs the events add up to the same message, finish
    reason and usage, and the deltas of a kind hold the same token positions in the same order.
    Deltas are merged within a run, not across runs.

    Without tools nothing is a call: markers are dropped, and what is between them is content.

    Args:
        prompt: the conversation that is answered.
        max_tokens, min_tokens, stop_ids, own_stop_ids, stop, include_stop, skip_special_tokens:
            as `OutputReader` takes them.

    Attributes:
        message: what the events added up to so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: ChatPrompt,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
        own_stop_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._reader = OutputReader(
            tokenizer,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_ids=stop_ids,
            own_stop_ids=own_stop_ids,
            stop=stop,
            include_stop=include_stop,
            skip_special_tokens=skip_special_tokens,
            markers=markers_of(tokenizer),
            spelled=SPELLED if prompt.tools else None,
        )
        self._stop_ids = frozenset(stop_ids)
        self._splitter = ReasoningSplitter(prompt.is_thinking)
        self._calls = ToolCallReader(prompt.tools, prompt.calls) if prompt.tools else None
        self._prompt_tokens = len(prompt.token_ids)
        self._cached_tokens = 0
        self.message = ChatMessage()

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended."""
        return self.message.finish is not None

    @property
    def token_ids(self) -> list[int]:
        """The tokens that were read, the stop token included."""
        return self._reader.token_ids

    def usage(self) -> Usage:
        """Returns the tokens counted so far."""
        count = len(self._reader.token_ids)
        # The token that ends an answer is no thought, whatever it interrupts.
        ends = count > 0 and self._reader.token_ids[-1] in self._stop_ids
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=count,
            reasoning_tokens=self._splitter.tokens(count - ends),
            cached_tokens=self._cached_tokens,
        )

    def set_cached_tokens(self, count: int) -> None:
        """Notes how many of the prompt's tokens came from the cache."""
        self._cached_tokens = count

    def push(self, token_ids: Sequence[int]) -> list[Event]:
        """Returns the events of a run of accepted tokens; with the last of them, `Finish`.

        Tokens after the end of the answer are not read.
        """
        if self.is_finished:
            return []
        events: list[Event] = []
        for piece in self._reader.push(token_ids):
            events += self._events(piece)
        if self._reader.finish_reason is not None:
            events += self._finish(self._reader.finish_reason)
        return self._told(events)

    def end(self, reason: str) -> list[Event]:
        """Returns the events of an end from outside, such as "abort"; none after the end."""
        if self.is_finished:
            return []
        events = [event for piece in self._reader.end(reason) for event in self._events(piece)]
        events += self._finish(reason)
        return self._told(events)

    def _told(self, events: list[Event]) -> list[Event]:
        merged = merge_deltas(events)
        for event in merged:
            self.message.add(event)
        return merged

    def _events(self, piece: Piece) -> Iterator[Event]:
        if self._calls is not None and self._calls.is_inside:
            yield from self._calls.push(piece)
            return
        found = self._splitter.push(piece)
        if found is None:
            return
        piece, is_thought = found
        if is_thought:
            yield ReasoningDelta(piece.text, piece.tokens)
        elif self._calls is not None:
            yield from self._calls.push(piece)
        elif piece.marker is None:
            yield ContentDelta(piece.text, piece.tokens)

    def _finish(self, reason: str) -> Iterator[Event]:
        if self._calls is not None:
            yield from self._calls.end(is_cut=reason != "stop")
            if reason == "stop" and self._calls.calls_finish:
                reason = "tool_calls"
        yield Finish(reason, self._reader.stop_reason, self.usage())
