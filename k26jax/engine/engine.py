"""The engine loop: admit, run, read; any number of requests through a fixed number of slots."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence

import numpy as np

from k26jax.engine.cluster import follow, make_runner
from k26jax.engine.loading import Loaded
from k26jax.engine.output import (
    CompletionOutput,
    RequestMetrics,
    StepTrace,
    StreamChunk,
    Transcript,
)
from k26jax.engine.request import Request
from k26jax.errors import RequestError
from k26jax.spec.step import Steps

_BUSY = (
    "another run of this LLM is in progress, such as a stream that is not read to its end; finish "
    "or close it first"
)

_FOLLOWS = "this process follows process 0, which takes the requests; call follow() here"


class _Running:
    """A request that has a slot."""

    def __init__(self, number: int, transcript: Transcript):
        self.number = number
        self.transcript = transcript
        self.metrics = RequestMetrics()
        self.started = time.perf_counter()

    def chunk(self, token_ids: Sequence[int], traces: list[StepTrace]) -> StreamChunk:
        """Returns what these tokens add; the whole output with the last of them."""
        text, taken = self.transcript.push(token_ids)
        elapsed = time.perf_counter() - self.started
        self.metrics.generated_tokens += len(taken)
        self.metrics.e2e_seconds = elapsed
        if self.metrics.generated_tokens == len(taken):
            self.metrics.ttft_seconds = elapsed
        return StreamChunk(text, taken, self.transcript.finish_reason, self._output(), traces)

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
        )


class Engine:
    """Runs requests on the slots of one runner, first come first served, one run at a time."""

    def __init__(self, loaded: Loaded):
        self.loaded = loaded
        self.runner = make_runner(loaded)
        self._in_use = threading.Lock()

    def follow(self) -> None:
        """Does what process 0 tells, until it shuts down; returns at once where there is no other.

        Raises: ClusterError if a process of the run is lost.
        """
        if self.loaded.cluster is not None and not self.loaded.leads:
            follow(self.runner, self.loaded.cluster)

    def refuse_if_busy(self) -> None:
        """Raises RequestError if a run is in progress; it would lose its slots to another."""
        if not self.loaded.leads:
            raise RequestError(_FOLLOWS)
        if self._in_use.locked():
            raise RequestError(_BUSY)

    def run(
        self,
        requests: Iterable[Request],
        *,
        steps_per_dispatch: int | None = None,
        trace: bool = False,
    ) -> Generator[tuple[int, StreamChunk], None, None]:
        """Yields (number of the request, chunk) until every request has ended.

        The run has all slots from its first chunk on; its end, its `close` and an error free them.

        Args:
          requests: read one by one, each when a slot is free for it.
          steps_per_dispatch: steps between two looks of the host; default: the configured number.
          trace: record the trees of each step.

        Raises: RequestError at the first chunk if another run is in progress, at the next one if
          the runner was closed.
        """
        waiting = enumerate(requests)
        is_more = True
        limit = steps_per_dispatch or self.loaded.config.steps_per_dispatch
        with self._take_slots() as slots:
            while is_more or slots:
                for slot in [s for s in range(self.runner.slots) if s not in slots]:
                    item = next(waiting, None)
                    is_more = item is not None
                    if item is None:
                        break
                    yield from self._admit(slot, item, slots)
                if slots:
                    steps = self.runner.run(limit, record_trees=trace)
                    yield from self._read(steps, slots)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Returns the target's logits after each token, float32 [t, w].

        Raises: RequestError if a run is in progress.
        """
        with self._take_slots():
            return self.runner.logits(token_ids)

    @contextlib.contextmanager
    def _take_slots(self) -> Iterator[dict[int, _Running]]:
        """Gives the caller all slots; those that it leaves busy are freed."""
        if not self.loaded.leads:
            raise RequestError(_FOLLOWS)
        if not self._in_use.acquire(blocking=False):
            raise RequestError(_BUSY)
        slots: dict[int, _Running] = {}
        try:
            self.runner.restore()
            yield slots
        finally:
            try:
                for slot in slots:
                    self.runner.release(slot)
            finally:
                self._in_use.release()

    def _admit(
        self, slot: int, item: tuple[int, Request], slots: dict[int, _Running]
    ) -> Iterator[tuple[int, StreamChunk]]:
        number, request = item
        slots[slot] = _Running(number, Transcript(request, self.loaded.tokenizer))
        first_token = self.runner.prefill(slot, request)
        yield from self._emit(slot, [first_token], [], slots)

    def _read(self, steps: Steps, slots: dict[int, _Running]) -> Iterator[tuple[int, StreamChunk]]:
        """Yields one chunk per step and running sequence, in the order of the steps."""
        assert steps.n_run > 0, f"slots {list(slots)} are busy here and idle on the device"
        for step in range(int(steps.n_run)):
            for slot, running in list(slots.items()):
                count = int(steps.emitted_len[step, slot])
                if not count:
                    continue
                running.metrics.target_forwards += 1
                running.metrics.accept_lengths.append(int(steps.accepted_len[step, slot]))
                token_ids = steps.tokens[step, slot, :count].tolist()
                traces = [] if steps.trees is None else [_trace(steps, step, slot)]
                yield from self._emit(slot, token_ids, traces, slots)

    def _emit(
        self,
        slot: int,
        token_ids: list[int],
        traces: list[StepTrace],
        slots: dict[int, _Running],
    ) -> Iterator[tuple[int, StreamChunk]]:
        running = slots[slot]
        chunk = running.chunk(token_ids, traces)
        if chunk.finish_reason is not None:
            # A stop string is seen here alone; the device may have gone on.
            self.runner.release(slot)
            del slots[slot]
        yield running.number, chunk


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
