"""The requests in an engine's slots: admitted, advanced, freed; one road for all who run them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from k26jax.engine.logprobs import Logprob, read_logprobs
from k26jax.engine.output import (
    CompletionOutput,
    RequestMetrics,
    StepTrace,
    StreamChunk,
    Transcript,
)
from k26jax.engine.request import Request
from k26jax.engine.runner import Runner
from k26jax.spec.step import Steps
from k26jax.text.tokenizer import Tokenizer

Numbered = tuple[int, StreamChunk]


class _Running:
    """A request that has a slot."""

    def __init__(self, number: int, transcript: Transcript):
        self.number = number
        self.transcript = transcript
        self.metrics = RequestMetrics()
        self.logprobs: list[dict[int, Logprob]] = []
        self.started = time.perf_counter()

    @property
    def tells_logprobs(self) -> bool:
        """Whether its log-probabilities are asked for."""
        return self.transcript.request.params.logprobs is not None

    def chunk(
        self,
        token_ids: Sequence[int],
        traces: list[StepTrace],
        logprobs: list[dict[int, Logprob]],
    ) -> StreamChunk:
        """Returns what these tokens add; the whole output with the last of them."""
        text, taken = self.transcript.push(token_ids)
        told = logprobs[: len(taken)] if self.tells_logprobs else None
        self.logprobs += told or []
        elapsed = time.perf_counter() - self.started
        self.metrics.generated_tokens += len(taken)
        self.metrics.e2e_seconds = elapsed
        if self.metrics.generated_tokens == len(taken):
            self.metrics.ttft_seconds = elapsed
        return StreamChunk(
            text=text,
            token_ids=taken,
            finish_reason=self.transcript.finish_reason,
            output=self._output(),
            cached_tokens=self.metrics.cached_tokens,
            traces=traces,
            logprobs=told,
            shown=self.transcript.shown,
        )

    def _output(self) -> CompletionOutput | None:
        transcript = self.transcript
        if transcript.finish_reason is None:
            return None
        return CompletionOutput(
            index=0,
            text=transcript.text,
            token_ids=transcript.token_ids,
            finish_reason=transcript.finish_reason,
            stop_reason=transcript.stop_reason,
            metrics=self.metrics,
            logprobs=self.logprobs if self.tells_logprobs else None,
        )


class Slots:
    """The slots of one runner while one caller has them; requests go by the caller's numbers."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None):
        self._runner, self._tokenizer = runner, tokenizer
        self._running: dict[int, _Running] = {}
        self._prompts: deque[int] = deque()  # slots whose prompt is not whole yet

    def __len__(self) -> int:
        return len(self._running)

    @property
    def free(self) -> int:
        """How many slots are free."""
        return self._runner.slots - len(self._running)

    def admit(self, number: int, request: Request) -> Numbered:
        """Returns the number and the first chunk of a request, which has a slot unless it ended.

        Cost: the prefill of its prompt. There must be a free slot, and no unfinished prompt.
        """
        self.begin(number, request)
        while (first := self.prefill_next()) is None:
            pass
        return first

    def begin(self, number: int, request: Request) -> None:
        """Gives a slot to a request, whose prompt `prefill_next` puts there chunk by chunk."""
        slot = next(slot for slot in range(self._runner.slots) if slot not in self._running)
        self._running[slot] = _Running(number, Transcript(request, self._tokenizer))
        self._prompts.append(slot)
        self._runner.begin(slot, request)

    def prefill_next(self) -> Numbered | None:
        """Puts one more chunk of the oldest unfinished prompt in its place, if there is any.

        Returns the number and the first chunk of a request whose prompt is whole now.
        """
        if not self._prompts:
            return None
        slot = self._prompts[0]
        first_token = self._runner.prefill_next(slot)
        if first_token is None:
            return None
        self._prompts.popleft()
        self._running[slot].metrics.cached_tokens = self._runner.cached_tokens(slot)
        logprobs = []
        if self._running[slot].tells_logprobs:
            found = self._runner.first_log_probs(slot)
            logprobs = self._logprobs(slot, [first_token], [array[0] for array in found])
        return self._emit(slot, [first_token], [], logprobs)

    @property
    def decoding(self) -> int:
        """How many requests have their whole prompt in place."""
        return len(self._running) - len(self._prompts)

    def advance(self, limit: int, *, trace: bool = False) -> Iterator[Numbered]:
        """Yields one chunk per step and running request, in the order of the steps; one dispatch.

        Args:
          limit: steps to run at most. There must be a request that is `decoding`.
          trace: record the trees of each step.
        """
        steps = self._runner.run(limit, record_trees=trace)
        assert steps.n_run > 0, f"slots {list(self._running)} are busy here and idle on the device"
        for step in range(int(steps.n_run)):
            for slot, running in list(self._running.items()):
                count = int(steps.emitted_len[step, slot])
                if not count:
                    continue
                running.metrics.target_forwards += 1
                if steps.rows is not None:
                    running.metrics.count_rows(int(steps.rows[step]))
                running.metrics.accept_lengths.append(int(steps.accepted_len[step, slot]))
                token_ids = steps.tokens[step, slot, :count].tolist()
                traces = [] if steps.trees is None else [_trace(steps, step, slot)]
                logprobs = []
                if running.tells_logprobs:
                    assert steps.log_probs is not None, "the runner knows who asks"
                    rows = [array[step, slot] for array in steps.log_probs]
                    logprobs = self._logprobs(slot, token_ids, rows)
                yield self._emit(slot, token_ids, traces, logprobs)

    def abort(self, number: int) -> None:
        """Frees the slot of a request before its end."""
        slot = next(slot for slot, found in self._running.items() if found.number == number)
        self._runner.release(slot)
        del self._running[slot]
        if slot in self._prompts:
            self._prompts.remove(slot)

    def abort_all(self) -> None:
        """Frees every slot."""
        for slot in self._running:
            self._runner.release(slot)
        self._running.clear()
        self._prompts.clear()

    def flush(self) -> int:
        """Returns how many tokens the prefix cache held before; all slots must be free."""
        return self._runner.flush()

    def check_idle(self) -> None:
        """Raises AssertionError unless every slot and every page of the prefix cache is free."""
        assert not self._running, f"idle with {len(self._running)} slots in use"
        if (pages := self._runner.pages) is not None:
            pages.check_idle()

    def _logprobs(
        self, slot: int, token_ids: list[int], rows: Sequence[Any]
    ) -> list[dict[int, Logprob]]:
        """Returns what is told of each token, of the arrays of `LogProbs` row by row."""
        count = self._running[slot].transcript.request.params.logprobs
        return [
            read_logprobs(found, count or 0, self._tokenizer)
            for found in zip(token_ids, *rows, strict=False)  # rows have padding
        ]

    def _emit(
        self,
        slot: int,
        token_ids: list[int],
        traces: list[StepTrace],
        logprobs: list[dict[int, Logprob]],
    ) -> Numbered:
        running = self._running[slot]
        chunk = running.chunk(token_ids, traces, logprobs)
        if chunk.finish_reason is not None:
            # A stop string is seen here alone; the device may have gone on.
            self._runner.release(slot)
            del self._running[slot]
        return running.number, chunk


def _trace(steps: Steps, step: int, slot: int) -> StepTrace:
    trees, paths = steps.trees, steps.paths
    assert trees is not None
    assert paths is not None
    valid = np.asarray(trees.valid[step, slot])
    accepted = int(steps.accepted_len[step, slot])
    return StepTrace(
        token_ids=np.asarray(trees.token_ids[step, slot])[valid].tolist(),
        parents=np.asarray(trees.parent[step, slot])[valid].tolist(),
        depths=np.asarray(trees.depth[step, slot])[valid].tolist(),
        path=np.asarray(paths[step, slot])[:accepted].tolist(),
    )
