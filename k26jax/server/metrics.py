"""What Prometheus reads, with the names of vLLM's metrics behind `k26jax_`."""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from k26jax.engine.output import StreamChunk
from k26jax.engine.scheduler import ABORT, ERROR, Job

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counts and times of one server; a watcher of its scheduler.

    Args:
        model: name of the model, the only label that all metrics share.

    Attributes:
        drafted: nodes besides the root that a step tries, where all try as many.
        tokens: generated so far.
    """

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._model, self.drafted = model, 0
        self._last: dict[int, float] = {}
        self._lengths: Tally[int] = Tally()
        self._rows: Tally[int] = Tally()
        self._lock = threading.Lock()
        self.tokens = 0
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self._cached = self._counter("cached_tokens", "Tokens of prompts from the prefix cache")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._succeeded = self._counter(
            "request_success", "Sequences that ended by themselves", "finished_reason"
        )
        self._errors = self._counter("request_errors", "Requests answered with an error", "code")
        self._aborted = self._counter("requests_aborted", "Sequences aborted")
        self._drafts = self._counter("spec_decode_num_drafts", "Decoding steps of sequences")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tree nodes tried")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Tree nodes accepted")
        self._steps = self._counter("spec_decode_steps", "Decoding steps by their rows", "rows")
        self._ttft = self._histogram("time_to_first_token_seconds", "From queued to first", _LONG)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two steps", _SHORT)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From queued to end", _LONG)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for a slot", _LONG)
        self._prefill = self._histogram("request_prefill_time_seconds", "Prefill", _LONG)
        self._decode = self._histogram("request_decode_time_seconds", "After the first", _LONG)
        self._length = self._histogram(
            "spec_accept_length", "Nodes accepted a step, with the root", tuple(range(1, 17))
        )

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Adds a gauge that is read when it is asked for."""
        gauge = Gauge(f"k26jax_{name}", text, ["model_name"], registry=self.registry)
        gauge.labels(self._model).set_function(read)

    def build_info(self, **labels: str) -> None:
        """Adds what was built into this server, as labels of a gauge that is 1."""
        info = Gauge("k26jax_build_info", "Versions", list(labels), registry=self.registry)
        info.labels(**labels).set(1)

    def emitted(self, job: Job, chunk: StreamChunk) -> None:
        """See `Watcher`."""
        now = time.monotonic()
        self.tokens += len(chunk.token_ids)
        self._generated.labels(self._model).inc(len(chunk.token_ids))
        before = self._last.pop(job.number, None)
        if before is not None:
            self._itl.labels(self._model).observe(now - before)
        elif job.admitted_at is not None and job.first_at is not None:
            self._prompt_tokens.labels(self._model).inc(len(job.request.prompt_token_ids))
            self._cached.labels(self._model).inc(chunk.cached_tokens)
            self._queue.labels(self._model).observe(job.admitted_at - job.queued_at)
            self._prefill.labels(self._model).observe(job.first_at - job.admitted_at)
            self._ttft.labels(self._model).observe(job.first_at - job.queued_at)
        if chunk.output is None:
            self._last[job.number] = now

    def ended(self, job: Job) -> None:
        """See `Watcher`."""
        assert job.ended_at is not None
        if job.outcome in (ABORT, ERROR):
            self._last.pop(job.number, None)
        if job.outcome == ABORT:
            self._aborted.labels(self._model).inc()
        if job.output is None:
            return
        metrics = job.output.metrics
        self._succeeded.labels(self._model, job.outcome).inc()
        self._e2e.labels(self._model).observe(job.ended_at - job.queued_at)
        if job.first_at is not None:
            self._decode.labels(self._model).observe(job.ended_at - job.first_at)
        self._drafts.labels(self._model).inc(metrics.target_forwards)
        rows = metrics.rows or {self.drafted + 1: metrics.target_forwards}
        tried = sum((width - 1) * steps for width, steps in rows.items())
        self._draft_tokens.labels(self._model).inc(tried)
        for width, steps in rows.items():
            self._steps.labels(self._model, width).inc(steps)
        nodes = sum(metrics.accept_lengths) - metrics.target_forwards
        self._accepted.labels(self._model).inc(nodes)
        with self._lock:
            self._lengths.update(metrics.accept_lengths)
            self._rows.update(rows)
        for length in metrics.accept_lengths:
            self._length.labels(self._model).observe(length)

    def refused(self, code: str) -> None:
        """Counts a request that was answered with an error."""
        self._errors.labels(self._model, code).inc()

    def accept_lengths(self) -> dict[int, int]:
        """Returns how many steps accepted how many nodes, the root included."""
        with self._lock:
            return dict(sorted(self._lengths.items()))

    def rows(self) -> dict[int, int]:
        """Returns how many decoding steps had how many rows, of all sequences that ended."""
        with self._lock:
            return dict(sorted(self._rows.items()))

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"k26jax_{name}", text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"k26jax_{name}", text, ["model_name"], buckets=buckets, registry=self.registry
        )
