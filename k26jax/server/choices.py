"""One sequence of an answer as an OpenAI choice, whole or in pieces; no HTTP here."""

from __future__ import annotations

import abc
from typing import Any

from k26jax.engine.output import RequestMetrics, StreamChunk
from k26jax.engine.scheduler import ERROR, Ended
from k26jax.errors import EngineFailedError
from k26jax.server.logprobs import TokenLogprobs, joined
from k26jax.text.answer import ChatAnswer
from k26jax.text.events import ContentDelta, Event, Finish, ReasoningDelta, Usage, delta_of


class Choice(abc.ABC):
    """A sequence that is read as it comes.

    Attributes:
        index: its number among the choices.
        metrics: of the whole sequence, once it ended by itself.
    """

    def __init__(self, index: int):
        self.index = index
        self.metrics: RequestMetrics | None = None
        self._cached_tokens = 0
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._chunks = 0

    @abc.abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Returns the pieces with which a stream begins."""

    @abc.abstractmethod
    def record(self) -> dict[str, Any]:
        """Returns the whole choice."""

    @abc.abstractmethod
    def usage(self) -> Usage:
        """Returns the tokens so far."""

    @abc.abstractmethod
    def _read(self, item: StreamChunk | Ended) -> list[dict[str, Any]]:
        """Returns the pieces of an item, but for the one that ends a stream."""

    @abc.abstractmethod
    def _last(self) -> dict[str, Any]:
        """Returns what the piece has that ends a stream, besides the reason."""

    def take(self, item: StreamChunk | Ended) -> list[dict[str, Any]]:
        """Returns the pieces that an item adds; the last of all has the reason of the end.

        Raises: EngineFailedError if the item is an error.
        """
        if isinstance(item, Ended) and item.reason == ERROR:
            raise EngineFailedError("the engine failed on this request; see the server's log")
        if isinstance(item, StreamChunk):
            self._cached_tokens = item.cached_tokens
            self._chunks += 1
            self.metrics = item.output.metrics if item.output else None
        if self._finish_reason is not None:
            return []
        pieces = self._read(item)
        if self._finish_reason is not None:
            pieces.append({"index": self.index, **self._last(), "logprobs": None, **self._end()})
        return pieces

    def progress(self) -> tuple[int, int]:
        """Returns the decoding passes through the target so far, and the tokens that they gave."""
        if self.metrics is not None:
            return self.metrics.target_forwards, self.metrics.generated_tokens - 1
        # The first chunk is the prefill's, each other one a step's.
        return max(self._chunks - 1, 0), max(self.usage().completion_tokens - 1, 0)

    def _end(self) -> dict[str, Any]:
        return {
            "finish_reason": self._finish_reason,
            "matched_stop": self._stop_reason,
        }


class ChatChoice(Choice):
    """A message of the assistant.

    Args:
        logprobs: collects those of its tokens; None where nobody asks for them.
    """

    def __init__(self, index: int, answer: ChatAnswer, logprobs: TokenLogprobs | None = None):
        super().__init__(index)
        self._answer, self._logprobs = answer, logprobs
        self._told: dict[str, list[dict[str, Any]]] = {"content": [], "reasoning_content": []}

    def opening(self) -> list[dict[str, Any]]:
        """See `Choice`."""
        return [self._piece({"role": "assistant", "content": ""})]

    def record(self) -> dict[str, Any]:
        """See `Choice`."""
        logprobs = None if self._logprobs is None else self._told | {"refusal": None}
        message = self._answer.message.record()
        return {"index": self.index, "message": message, "logprobs": logprobs, **self._end()}

    def usage(self) -> Usage:
        """See `Choice`."""
        self._answer.set_cached_tokens(self._cached_tokens)
        return self._answer.usage()

    def _read(self, item: StreamChunk | Ended) -> list[dict[str, Any]]:
        if isinstance(item, Ended):
            events = self._answer.end(item.reason)
        else:
            if self._logprobs is not None:
                self._logprobs.add(item.logprobs)
            events = self._answer.push(item.token_ids)
            if item.finish_reason is not None:
                events += self._answer.end(item.finish_reason)
        for event in events:
            if isinstance(event, Finish):
                self._finish_reason, self._stop_reason = event.reason, event.stop_reason
        return [
            self._piece(delta, self._tell(event))
            for event in events
            if (delta := delta_of(event)) is not None
        ]

    def _tell(self, event: Event) -> dict[str, Any] | None:
        """Returns the log-probabilities of a delta's tokens; of calls of tools there are none."""
        if self._logprobs is None or not isinstance(event, ContentDelta | ReasoningDelta):
            return None
        name = "content" if isinstance(event, ContentDelta) else "reasoning_content"
        entries = self._logprobs.chat(event.tokens)
        self._told[name] += entries
        return {"content": None, "refusal": None} | {name: entries}

    def _piece(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _last(self) -> dict[str, Any]:
        return {"delta": {}}


class TextChoice(Choice):
    """A text that goes on from a prompt.

    Args:
        echo: text to begin with.
        logprobs: collects those of its tokens; None where nobody asks for them.
    """

    def __init__(
        self,
        index: int,
        prompt_tokens: int,
        echo: str = "",
        logprobs: TokenLogprobs | None = None,
    ):
        super().__init__(index)
        self._logprobs = logprobs
        self._told: list[dict[str, list[Any]]] = []
        self._prompt_tokens, self._echo = prompt_tokens, echo
        self._texts = [echo]
        self._tokens = 0

    def opening(self) -> list[dict[str, Any]]:
        """See `Choice`."""
        return [self._piece(self._echo)] if self._echo else []

    def record(self) -> dict[str, Any]:
        """See `Choice`."""
        logprobs = None if self._logprobs is None else joined(self._told)
        text = "".join(self._texts)
        return {"index": self.index, "text": text, "logprobs": logprobs, **self._end()}

    def usage(self) -> Usage:
        """See `Choice`."""
        return Usage(self._prompt_tokens, self._tokens, 0, self._cached_tokens)

    def _read(self, item: StreamChunk | Ended) -> list[dict[str, Any]]:
        if isinstance(item, Ended):
            self._finish_reason = item.reason
            return []
        self._tokens += len(item.token_ids)
        self._texts.append(item.text)
        self._finish_reason = item.finish_reason
        if item.output is not None:
            self._stop_reason = item.output.stop_reason
        logprobs = None
        if self._logprobs is not None:
            self._logprobs.add(item.logprobs)
            logprobs = self._logprobs.completion(item.shown)
            self._told.append(logprobs)
        return [self._piece(item.text, logprobs)] if item.text else []

    def _piece(self, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _last(self) -> dict[str, Any]:
        return {"text": ""}


def total_usage(choices: list[Choice], prompts: int) -> dict[str, Any]:
    """Returns the usage object of an answer.

    Args:
        choices: the same number for each prompt, prompt by prompt; a prompt counts once.
    """
    usages = [choice.usage() for choice in choices]
    each = len(choices) // prompts
    firsts = usages[::each]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in firsts),
    ).record()


def speculation(choices: list[Choice]) -> dict[str, Any]:
    """Returns what speculative decoding did for an answer so far."""
    progress = [choice.progress() for choice in choices]
    forwards = sum(passes for passes, _ in progress)
    tokens = sum(given for _, given in progress)
    return {
        "target_forwards": forwards,
        "accept_length": round(tokens / forwards, 3) if forwards else 0.0,
    }
