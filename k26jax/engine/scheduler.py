"""The loop of a server: one thread has the engine's slots and gives them to those who wait.

First come, first served. Between two dispatches of decoding steps one chunk of one prompt is
prefilled, so that a running request waits for one chunk at most; an abort is seen after the chunk
and the dispatch under way.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from k26jax.engine.engine import Engine
from k26jax.engine.output import CompletionOutput, StreamChunk
from k26jax.engine.request import Request
from k26jax.engine.slots import Slots
from k26jax.errors import BusyError, EngineFailedError, NotServingError, QueueFullError

ABORT, ERROR = "abort", "error"


@dataclass(frozen=True)
class Ended:
    """A job has ended without its last chunk. reason: "abort", or "error" with the error."""

    reason: str
    error: BaseException | None = None


Deliver = Callable[[StreamChunk | Ended], None]


@dataclass(eq=False)
class Job:
    """One sequence on its way through the loop.

    Fields:
        deliver: called in the loop's thread with every chunk, and with an `Ended` where the last
            chunk does not come; must not block.
        is_streamed: somebody reads it as it comes.
        is_traced: its chunks have the trees of their steps.
        queued_at, admitted_at, first_at, ended_at: monotonic seconds; None before.
        outcome: "stop", "length", "abort" or "error"; None before the end.
        output: the whole sequence, once it ended by itself.
        tokens: tokens delivered so far.
    """

    number: int
    request: Request
    deliver: Deliver
    is_streamed: bool
    is_traced: bool = False
    queued_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None
    outcome: str | None = None
    output: CompletionOutput | None = None
    tokens: int = 0


class Watcher(Protocol):
    """Who is told what happens, in the thread in which it happens."""

    def emitted(self, job: Job, chunk: StreamChunk) -> None:
        """A chunk is about to be delivered; with the last one, `ended` is called next."""

    def ended(self, job: Job) -> None:
        """A job has ended, however it did; its last item is about to be delivered."""


@dataclass
class Counts:
    """Jobs since the start; what was submitted has ended, runs or waits."""

    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0

    @property
    def ended(self) -> int:
        """Jobs that are over."""
        return self.finished + self.aborted + self.failed


class Scheduler:
    """Runs jobs on an engine, from `start` to `close`.

    Args:
        max_waiting: jobs that may wait for a slot.
        stream_steps: decoding steps between two looks of the host while a running job is streamed;
            without one it is the engine's steps_per_dispatch.
        watcher: told of chunks and ends.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 256,
        stream_steps: int = 1,
        watcher: Watcher | None = None,
    ):
        self._engine, self._watcher = engine, watcher
        self._max_waiting = max_waiting
        self._most_steps = engine.loaded.config.steps_per_dispatch
        self._stream_steps = min(stream_steps, self._most_steps)
        self._numbers = itertools.count()
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._aborted: set[int] = set()
        self._flushes: list[Future[int]] = []
        self._is_open = False
        self._is_closing = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._loop, name="k26jax-engine", daemon=True)
        self.counts = Counts()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Takes the engine's slots and begins to serve."""
        self._is_open = True
        self._thread.start()

    @property
    def running(self) -> int:
        """Jobs that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Jobs that wait for one."""
        return len(self._waiting)

    @property
    def kept_tokens(self) -> tuple[int, int]:
        """Tokens that the prefix cache holds, and those it has room for."""
        pages = self._engine.runner.pages
        return (0, 0) if pages is None else (pages.kept * pages.page_tokens, pages.tokens)

    def used_tokens(self) -> tuple[int, int]:
        """Returns the tokens of the jobs in slots, and those that all slots have room for."""
        with self._changed:
            jobs = list(self._running.values())
        used = sum(len(job.request.prompt_token_ids) + job.tokens for job in jobs)
        return used, self._engine.runner.slots * self._engine.loaded.context_length

    @property
    def is_open(self) -> bool:
        """Whether jobs are taken."""
        return self._is_open and self.error is None

    @property
    def is_alive(self) -> bool:
        """Whether the loop's thread runs."""
        return self._thread.is_alive() and self.error is None

    def busy_seconds(self) -> float:
        """Returns how long the device call under way has taken; 0 where there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(
        self,
        requests: Sequence[Request],
        delivers: Sequence[Deliver],
        *,
        is_streamed: bool = True,
        is_traced: bool = False,
    ) -> list[Job]:
        """Returns the jobs of some requests, all of which wait for slots now, or none.

        Raises: QueueFullError if not all may wait, NotServingError if no jobs are taken,
            EngineFailedError after an error of the engine.
        """
        with self._changed:
            if self.error is not None:
                raise EngineFailedError("the engine has failed; see the server's log")
            if not self._is_open:
                raise NotServingError("the server is starting or stopping; try again later")
            # Slots that are free now take theirs at once.
            room = self._max_waiting + self._engine.runner.slots - len(self._running)
            if len(self._waiting) + len(requests) > room:
                raise QueueFullError(
                    f"{len(self._waiting)} sequences wait and {self._max_waiting} may; try again "
                    "later"
                )
            jobs = [
                Job(next(self._numbers), request, deliver, is_streamed, is_traced)
                for request, deliver in zip(requests, delivers, strict=True)
            ]
            self._waiting += jobs
            self.counts.submitted += len(jobs)
            self._changed.notify_all()
        return jobs

    def abort(self, job: Job) -> bool:
        """Ends a job; returns whether it had not ended yet. Its slot is free after one dispatch."""
        with self._changed:
            if job.outcome is not None:
                return False
            if job in self._waiting:
                self._waiting.remove(job)
                self._end(job, ABORT, Ended(ABORT))
            else:
                self._aborted.add(job.number)
            self._changed.notify_all()
        return True

    def flush(self, seconds: float = 10.0) -> int:
        """Returns how many tokens the prefix cache held; it is empty now.

        Raises: BusyError if jobs run or wait, NotServingError if the loop has ended.
        """
        done: Future[int] = Future()
        with self._changed:
            if self._running or self._waiting:
                raise BusyError(
                    f"sequences run ({self.running}) or wait ({self.waiting}); the prefix cache is "
                    "flushed while none does: end them (/abort_request) or try again later"
                )
            if not self.is_open:
                raise NotServingError("the server is starting or stopping; try again later")
            self._flushes.append(done)
            self._changed.notify_all()
        return done.result(seconds)

    def drain(self) -> None:
        """Takes no more jobs; those that wait and run go on."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def wait_idle(self, seconds: float) -> bool:
        """Returns whether nothing runs and nothing waits, at the latest after some seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.error is not None or not (self._waiting or self._running), seconds
            )

    def close(self, seconds: float = 60.0) -> bool:
        """Aborts what is left and ends the loop; returns whether it ended in that time."""
        with self._changed:
            self._is_open, self._is_closing = False, True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        try:
            with self._engine.take_slots() as slots:
                while self._turn(slots):
                    pass
        except BaseException as error:
            self._fail(error)

    def _turn(self, slots: Slots) -> bool:
        """Frees, admits and advances once; returns False at the end of the loop."""
        admitted = self._prepare(slots)
        if admitted is None:
            return False
        self._busy_since = time.monotonic()
        for job in admitted:
            slots.begin(job.number, job.request)
        if (first := slots.prefill_next()) is not None:
            self._deliver(*first)
        if slots.decoding:
            streamed = any(job.is_streamed for job in self._running.values())
            traced = any(job.is_traced for job in self._running.values())
            limit = self._stream_steps if streamed else self._most_steps
            for number, chunk in slots.advance(limit, trace=traced):
                self._deliver(number, chunk)
        self._busy_since = None
        return True

    def _prepare(self, slots: Slots) -> list[Job] | None:
        """Frees the slots of aborted jobs and returns what to admit.

        Waits while there is nothing to do. Returns None at the end of the loop.
        """
        with self._changed:
            self._flush(slots)
            while not (self._waiting or self._running or self._is_closing):
                self._check_idle(slots)
                self._changed.wait()
                self._flush(slots)
            if self._is_closing:
                self._aborted |= self._running.keys()
                for job in self._waiting:
                    self._end(job, ABORT, Ended(ABORT))
                self._waiting.clear()
            for number in self._aborted & self._running.keys():
                slots.abort(number)
                self._end(self._running.pop(number), ABORT, Ended(ABORT))
                self._changed.notify_all()
            self._aborted.clear()
            if self._is_closing:
                self._check_idle(slots)
                return None
            admitted = [self._waiting.popleft() for _ in range(min(slots.free, len(self._waiting)))]
            for job in admitted:
                job.admitted_at = time.monotonic()
                self._running[job.number] = job
            return admitted

    def _flush(self, slots: Slots) -> None:
        """Empties the prefix cache for those who asked for it while nothing ran or waited."""
        while self._flushes:
            self._flushes[-1].set_result(slots.flush())
            self._flushes.pop()

    def _deliver(self, number: int, chunk: StreamChunk) -> None:
        with self._changed:
            job = self._running[number]
            job.first_at = job.first_at or time.monotonic()
            job.tokens += len(chunk.token_ids)
            if self._watcher is not None:
                self._watcher.emitted(job, chunk)
            if chunk.output is not None:
                del self._running[number]
                job.output = chunk.output
                self._end(job, chunk.output.finish_reason, chunk)
                self._changed.notify_all()
            else:
                job.deliver(chunk)

    def _end(self, job: Job, outcome: str, last: StreamChunk | Ended) -> None:
        """Ends a job; its last item is delivered once all else is told."""
        job.outcome, job.ended_at = outcome, time.monotonic()
        if outcome == ABORT:
            self.counts.aborted += 1
        elif outcome == ERROR:
            self.counts.failed += 1
        else:
            self.counts.finished += 1
        if self._watcher is not None:
            self._watcher.ended(job)
        job.deliver(last)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error, self._busy_since = error, None
            for job in [*self._running.values(), *self._waiting]:
                self._end(job, ERROR, Ended(ERROR, error))
            self._running.clear()
            self._waiting.clear()
            for done in self._flushes:
                done.set_exception(EngineFailedError("the engine has failed; see the server's log"))
            self._flushes.clear()
            self._changed.notify_all()

    def _check_idle(self, slots: Slots) -> None:
        """Raises AssertionError unless what was submitted has ended and nothing is held."""
        counts = self.counts
        assert counts.submitted == counts.ended, f"idle with jobs unaccounted for: {counts}"
        slots.check_idle()
