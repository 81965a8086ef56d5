"""What a caller gets back, and how accepted token runs become text. No JAX here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from k26jax.engine.logprobs import Logprob
from k26jax.engine.request import Request
from k26jax.text.events import ChatMessage
from k26jax.text.reader import OutputReader
from k26jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StepTrace:
    """One decoding step of one sequence, for showing.

    token_ids, parents, depths: the tree's nodes, root first.
    path: accepted nodes, root first.
    """

    token_ids: list[int]
    parents: list[int]
    depths: list[int]
    path: list[int]


@dataclass
class RequestMetrics:
    """Times and counts of one sequence.

    ttft_seconds: from the start of its prefill to its first token.
    e2e_seconds: from the start of its prefill to its last token.
    generated_tokens: tokens returned.
    target_forwards: decoding passes through the target; the prefill, which gives the first token,
        is not counted.
    accept_lengths: nodes accepted by each of them, the root included, limits aside.
    cached_tokens: prompt tokens taken from the prefix cache instead of run.
    rows: how many of them had how many rows, where each step chooses; else empty.
    """

    ttft_seconds: float = 0.0
    e2e_seconds: float = 0.0
    generated_tokens: int = 0
    target_forwards: int = 0
    accept_lengths: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    rows: dict[int, int] = field(default_factory=dict)

    def count_rows(self, rows: int) -> None:
        """Counts a decoding pass of as many rows."""
        self.rows[rows] = self.rows.get(rows, 0) + 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first over the time after the first."""
        seconds = self.e2e_seconds - self.ttft_seconds
        return (self.generated_tokens - 1) / seconds if seconds > 0 else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens returned per target forward, the prefill's token aside; 0 without a forward."""
        if not self.target_forwards:
            return 0.0
        return (self.generated_tokens - 1) / self.target_forwards


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    token_ids: everything emitted, the stop token included.
    finish_reason: "stop" or "length".
    stop_reason: the stop string or the id from stop_token_ids that ended it, else None.
    message: what the text says as the answer of a chat; None outside of one.
    logprobs: for each of token_ids, if asked for: what the target thought of it and of the most
        likely tokens there, by id, the token itself first, then those best first.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    metrics: RequestMetrics
    message: ChatMessage | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    def record(self, prompt_tokens: int) -> dict[str, Any]:
        """Returns what machines read of it: an object that JSON can hold."""
        found: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(self.token_ids),
                "prompt_tokens_details": {"cached_tokens": self.metrics.cached_tokens},
            },
            "metrics": {
                "accept_length": self.metrics.accept_length,
                "target_forwards": self.metrics.target_forwards,
                "tokens_per_second": self.metrics.tokens_per_second,
                "ttft_seconds": self.metrics.ttft_seconds,
            },
        }
        if self.logprobs is not None:
            found["logprobs"] = [
                [{"token_id": id, **asdict(item)} for id, item in token.items()]
                for token in self.logprobs
            ]
        if self.metrics.rows:
            found["metrics"]["rows"] = {str(n): c for n, c in sorted(self.metrics.rows.items())}
        if self.message is not None and self.message.finish is not None:
            found["message"] = self.message.record()
            found["finish_reason"] = self.message.finish.reason
            found["usage"] = self.message.finish.usage.record()
        return found


@dataclass(frozen=True)
class RequestOutput:
    """The result for one prompt; `error` says why if there is none."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    error: str | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first sequence took from the prefix cache."""
        return self.metrics.cached_tokens

    @property
    def metrics(self) -> RequestMetrics:
        """Metrics of the first sequence; empty ones if the prompt failed."""
        return self.outputs[0].metrics if self.outputs else RequestMetrics()


@dataclass(frozen=True)
class StreamChunk:
    """What one step added: text that is final, its tokens, and the end if it came.

    output: the whole sequence, in the last chunk only.
    cached_tokens: prompt tokens taken from the prefix cache, in every chunk.
    traces: trees of the steps behind this chunk, if asked for.
    logprobs: of token_ids, as in `CompletionOutput`.
    shown: for the tokens that begin in this text: their position in the output, and their first
        character in its text.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: CompletionOutput | None = None
    cached_tokens: int = 0
    traces: list[StepTrace] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    shown: list[tuple[int, int]] = field(default_factory=list)


class Transcript:
    """Collects a sequence's tokens, turns them into text and notices its end.

    Attributes:
        shown: of the tokens that begin in the newest text, as in `StreamChunk`.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        self.request = request
        self._reader = OutputReader(tokenizer, **reading(request))
        self._texts: list[str] = []
        self.shown: list[tuple[int, int]] = []

    @property
    def token_ids(self) -> list[int]:
        """Everything read, the stop token included."""
        return self._reader.token_ids

    @property
    def text(self) -> str:
        """All text that is final."""
        return "".join(self._texts)

    @property
    def finish_reason(self) -> str | None:
        """ "stop" or "length"; None before the end."""
        return self._reader.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or own stop id that ended it, else None."""
        return self._reader.stop_reason

    def push(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Returns the text and the ids that these tokens add; none once the sequence has ended."""
        before = len(self.token_ids)
        pieces = self._reader.push(token_ids)
        text = "".join(piece.text for piece in pieces)
        self._texts.append(text)
        starts = self._reader.starts
        self.shown = [(token, starts[token]) for piece in pieces for token in piece.tokens]
        return text, self.token_ids[before:]


def reading(request: Request) -> dict[str, Any]:
    """Returns how a request's tokens are read: the options of `OutputReader` and `ChatAnswer`."""
    params = request.params
    return {
        "max_tokens": request.max_tokens,
        "min_tokens": params.min_tokens,
        "stop_ids": request.stop_ids,
        "own_stop_ids": tuple(params.stop_token_ids or ()),
        "stop": params.stop_strings,
        "include_stop": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
    }
