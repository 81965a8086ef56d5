"""What a caller gets back, and how accepted token runs become text. No JAX here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from k26jax.engine.request import Request
from k26jax.text.detokenize import Detokenizer
from k26jax.text.stop import StopMatcher
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
    """

    ttft_seconds: float = 0.0
    e2e_seconds: float = 0.0
    generated_tokens: int = 0
    target_forwards: int = 0
    accept_lengths: list[int] = field(default_factory=list)

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
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    metrics: RequestMetrics

    def record(self, prompt_tokens: int) -> dict[str, Any]:
        """Returns what machines read of it: an object that JSON can hold."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(self.token_ids),
            },
            "metrics": {
                "accept_length": self.metrics.accept_length,
                "target_forwards": self.metrics.target_forwards,
                "tokens_per_second": self.metrics.tokens_per_second,
                "ttft_seconds": self.metrics.ttft_seconds,
            },
        }


@dataclass(frozen=True)
class RequestOutput:
    """The result for one prompt; `error` says why if there is none.

    cached_tokens: prompt tokens taken from the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    error: str | None = None
    cached_tokens: int = 0

    @property
    def metrics(self) -> RequestMetrics:
        """Metrics of the first sequence; empty ones if the prompt failed."""
        return self.outputs[0].metrics if self.outputs else RequestMetrics()


@dataclass(frozen=True)
class StreamChunk:
    """What one step added: text that is final, its tokens, and the end if it came.

    output: the whole sequence, in the last chunk only.
    traces: trees of the steps behind this chunk, if asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: CompletionOutput | None = None
    traces: list[StepTrace] = field(default_factory=list)


class Transcript:
    """Collects a sequence's tokens, turns them into text and notices its end."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        params = request.params
        self.request = request
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._detokenizer = (
            Detokenizer(tokenizer, params.skip_special_tokens) if tokenizer else None
        )
        self._matcher = StopMatcher(params.stop_strings, params.include_stop_str_in_output)

    def push(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Returns the text and the ids that these tokens add; none once the sequence has ended.

        Tokens go one by one, so where they were cut into runs changes nothing.
        """
        text_before, ids_before = len(self.text), len(self.token_ids)
        for token in token_ids:
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            self._read(token)
        return self.text[text_before:], self.token_ids[ids_before:]

    def _read(self, token: int) -> None:
        params = self.request.params
        is_stop = token in self.request.stop_ids
        if self._detokenizer and (not is_stop or params.include_stop_str_in_output):
            self._show(self._matcher.push(self._detokenizer.push([token])))
        if self.finish_reason is not None:
            return
        if is_stop:
            is_own = token in (params.stop_token_ids or ())
            self._end("stop", token if is_own else None)
        elif len(self.token_ids) >= self.request.max_tokens:
            self._end("length", None)

    def _end(self, reason: str, stop_reason: int | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer:
            self._show(self._matcher.push(self._detokenizer.flush()))
        self._show(self._matcher.flush())

    def _show(self, found: tuple[str, str | None]) -> None:
        shown, matched = found
        self.text += shown
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
