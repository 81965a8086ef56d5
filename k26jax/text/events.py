"""What happens while an answer is read, and the message that it adds up to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the thoughts. tokens: positions of the tokens that begin in this text."""

    text: str
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer's text. tokens: positions of the tokens that begin in this text."""

    text: str
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins. index: its place in the answer, from 0. id: in Kimi's form."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments, as the model writes them."""

    index: int
    text: str
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ToolCallEnd:
    """A call ends. is_complete: it was not cut off, so that its arguments may be acted on."""

    index: int
    is_complete: bool


@dataclass(frozen=True)
class UnreadableCall:
    """A call of no tool that can be told; its text is in the content. id_text: what named it."""

    id_text: str


@dataclass(frozen=True)
class Usage:
    """Tokens of a request.

    Fields:
        prompt_tokens: of the prompt; cached_tokens of them came from the cache.
        completion_tokens: read up to the end of the answer, the stop token included.
        reasoning_tokens: of those, the ones of thoughts, their tags aside.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int = 0

    def record(self) -> dict[str, Any]:
        """Returns the `usage` object of an answer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True)
class Finish:
    """The answer has ended.

    Fields:
        reason: "stop", "length", "tool_calls", or what a caller ended it with.
        stop_reason: the stop string or the own stop id that ended it, else None.
    """

    reason: str
    stop_reason: int | str | None
    usage: Usage


Event = (
    ReasoningDelta
    | ContentDelta
    | ToolCallStart
    | ToolCallArguments
    | ToolCallEnd
    | UnreadableCall
    | Finish
)


@dataclass
class ToolCall:
    """One call. is_complete: None until it ends."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)
    is_complete: bool | None = None

    @property
    def arguments(self) -> str:
        """The arguments as the model wrote them: JSON, if the call is complete and well made."""
        return "".join(self.parts)

    def record(self) -> dict[str, Any]:
        """Returns the call as an object of an assistant's message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage:
    """An assistant's message, as far as events have told it."""

    def __init__(self, events: Iterable[Event] = ()):
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.tool_calls: list[ToolCall] = []
        self.unreadable_calls = 0
        self.finish: Finish | None = None
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Takes what an event says into the message."""
        if isinstance(event, ReasoningDelta):
            self._reasoning.append(event.text)
        elif isinstance(event, ContentDelta):
            self._content.append(event.text)
        elif isinstance(event, ToolCallStart):
            self.tool_calls.append(ToolCall(event.id, event.name))
        elif isinstance(event, ToolCallArguments):
            self.tool_calls[event.index].parts.append(event.text)
        elif isinstance(event, ToolCallEnd):
            self.tool_calls[event.index].is_complete = event.is_complete
        elif isinstance(event, UnreadableCall):
            self.unreadable_calls += 1
        else:
            self.finish = event

    @property
    def reasoning(self) -> str | None:
        """The thoughts; None if there are none."""
        return "".join(self._reasoning) or None

    @property
    def content(self) -> str | None:
        """The text of the answer; None if it is nothing but calls."""
        return "".join(self._content) or (None if self.tool_calls else "")

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None before."""
        return self.finish.reason if self.finish else None

    def record(self) -> dict[str, Any]:
        """Returns the `message` object of a chat answer; without calls it has no tool_calls."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content,
            "reasoning_content": self.reasoning,
        }
        if self.tool_calls:
            message["tool_calls"] = [call.record() for call in self.tool_calls]
        return message


def delta_of(event: Event) -> dict[str, Any] | None:
    """Returns the `delta` object of an event in a streamed answer; None if it has none.

    A call's first delta has its id, type and name, all others its index and more arguments.
    """
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": event.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(event, ToolCallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def merge_deltas(events: Iterable[Event]) -> list[Event]:
    """Returns the same events with neighbouring deltas of one kind in one."""
    merged: list[Event] = []
    # Joined at once: one by one, a long run of deltas would be copied for each of them.
    for kind, group in itertools.groupby(events, _kind):
        if kind is None:
            merged += group
            continue
        deltas: list[Any] = list(group)
        text = "".join(delta.text for delta in deltas)
        tokens = tuple(itertools.chain.from_iterable(delta.tokens for delta in deltas))
        merged.append(replace(deltas[0], text=text, tokens=tokens))
    return merged


def _kind(event: Any) -> tuple[type, int] | None:
    """Returns what two deltas must share to be one; None for an event that stays alone."""
    if isinstance(event, ToolCallArguments):
        return ToolCallArguments, event.index
    return (type(event), 0) if isinstance(event, ReasoningDelta | ContentDelta) else None
