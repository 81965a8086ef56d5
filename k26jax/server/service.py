"""One served model: its LLM, its scheduler, how far it is, and the answers under way."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import platform
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import jax

from k26jax import __version__
from k26jax.engine.output import StreamChunk
from k26jax.engine.request import Request
from k26jax.engine.scheduler import Deliver, Ended, Job, Scheduler
from k26jax.errors import K26Error, NotServingError
from k26jax.llm import LLM
from k26jax.server import logs
from k26jax.server.errors import not_found
from k26jax.server.metrics import Metrics
from k26jax.server.settings import ServerSettings

Item = StreamChunk | Ended
Numbered = tuple[int, Item]


class Sequences:
    """The sequences of one request, from their place in the queue to their end."""

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request], **how: bool):
        self._scheduler = scheduler
        self._items: asyncio.Queue[Numbered] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        delivers = [self._deliver(index) for index in range(len(requests))]
        self.jobs: list[Job] = scheduler.submit(requests, delivers, **how)

    def _deliver(self, index: int) -> Deliver:
        def deliver(item: Item) -> None:
            # The loop is closed where a server was stopped at once; nobody reads then.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._items.put_nowait, (index, item))

        return deliver

    async def items(self, patience: float | None = None) -> AsyncGenerator[Numbered | None, None]:
        """Yields (sequence, item) up to the end of all; None when nothing came for a while."""
        left = len(self.jobs)
        while left:
            try:
                found = await asyncio.wait_for(self._items.get(), patience)
            except TimeoutError:
                yield None
                continue
            left -= isinstance(found[1], Ended) or found[1].output is not None
            yield found

    def abort(self) -> int:
        """Ends what has not ended; returns how many those were."""
        return sum(self._scheduler.abort(job) for job in self.jobs)

    def timing(self) -> str:
        """Returns the server-timing header of the first sequence."""
        job = self.jobs[0]
        marks = [job.queued_at, job.admitted_at, job.first_at, job.ended_at]
        found = []
        for name, begin, end in zip(
            ("queue", "prefill", "decode"), marks[:-1], marks[1:], strict=True
        ):
            if begin is not None and end is not None:
                found.append(f"{name};dur={1000 * (end - begin):.1f}")
        return ", ".join(found)


class Service:
    """What the routes know.

    Attributes:
        stage, percent: how far the start is; the stage is "ready" while requests are taken.
        created: when it was made, in seconds of the epoch.
    """

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.metrics = Metrics(settings.served_names[0])
        self.stage, self.percent = "starting", 0.0
        self.created = int(time.time())
        self._llm: LLM | None = None
        self._scheduler: Scheduler | None = None
        self._answers: dict[str, tuple[str, Sequences]] = {}

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.settings.served_names[0]

    @property
    def llm(self) -> LLM:
        """The model.

        Raises: NotServingError before it is loaded.
        """
        if self._llm is None:
            raise NotServingError(f"the server is starting ({self.stage}); try again later")
        return self._llm

    @property
    def scheduler(self) -> Scheduler:
        """The loop.

        Raises: NotServingError before it runs.
        """
        if self._scheduler is None:
            raise NotServingError(f"the server is starting ({self.stage}); try again later")
        return self._scheduler

    def open(self, llm: LLM) -> None:
        """Begins to serve a loaded model."""
        self.metrics.drafted = llm.engine.loaded.plan.budget
        scheduler = Scheduler(
            llm.engine,
            max_waiting=self.settings.max_waiting,
            stream_steps=self.settings.stream_steps,
            watcher=self.metrics,
        )
        self.metrics.gauge("num_requests_running", "In a slot", lambda: scheduler.running)
        self.metrics.gauge("num_requests_waiting", "In the queue", lambda: scheduler.waiting)
        self.metrics.gauge(
            "kv_cache_usage_ratio",
            "Used of the slots' rows",
            lambda: _ratio(scheduler.used_tokens()),
        )
        self.metrics.gauge(
            "prefix_cache_usage_ratio",
            "Pages that hold something",
            lambda: _ratio(scheduler.kept_tokens),
        )
        self.metrics.build_info(
            version=__version__, jax=jax.__version__, device=jax.devices()[0].device_kind
        )
        scheduler.start()
        self._llm, self._scheduler = llm, scheduler
        self.stage, self.percent = "ready", 100.0

    def drain(self, seconds: float) -> bool:
        """Takes no more requests; returns whether all ended in some seconds. Aborts the rest."""
        self.stage = "draining"
        if self._scheduler is None:
            return True
        self._scheduler.drain()
        is_idle = self._scheduler.wait_idle(seconds)
        self._scheduler.close()
        return is_idle

    def is_healthy(self) -> tuple[bool, str]:
        """Returns whether the loop lives, and what is wrong or going on."""
        scheduler = self._scheduler
        if scheduler is None or self.stage == "draining":
            return True, self.stage
        if not scheduler.is_alive:
            return False, "the engine has failed"
        busy = scheduler.busy_seconds()
        if busy > self.settings.stall_seconds:
            return False, f"a call of the device has taken {busy:.0f} s"
        return True, self.stage

    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._scheduler is not None and self._scheduler.is_open and self.is_healthy()[0]

    def check_model(self, name: str | None) -> str:
        """Returns the name to answer with; without one, the first served name.

        Raises: ApiError for a model that is not served.
        """
        if name is None or name in self.settings.served_names:
            return name or self.name
        served = ", ".join(self.settings.served_names)
        raise not_found(
            f"model {name!r:.80} is not served here; served: {served}",
            "model_not_found",
            param="model",
        )

    def submit(
        self, id: str, request_id: str, requests: Sequence[Request], **how: bool
    ) -> Sequences:
        """Returns the sequences of a request, which can be aborted by its ids until `forget`.

        Args:
            how: is_streamed and is_traced, as `Scheduler.submit` takes them.
        """
        sequences = Sequences(self.scheduler, requests, **how)
        self._answers[id] = request_id, sequences
        return sequences

    def forget(self, id: str) -> None:
        """Ends what is left of an answer, and forgets it."""
        _, sequences = self._answers.pop(id)
        sequences.abort()

    def abort(self, id: str | None) -> int:
        """Returns how many sequences were ended: of an id of an answer or request, None: of all.

        Raises: ApiError for an id of nothing that is under way.
        """
        found = [
            sequences
            for own, (request_id, sequences) in list(self._answers.items())
            if id is None or id in (own, request_id)
        ]
        if id is not None and not found:
            raise not_found(f"no request {id!r:.80} is under way", param="rid")
        return sum(sequences.abort() for sequences in found)

    def flush(self) -> int:
        """Returns how many tokens the prefix cache held; it is empty now. Waits for the loop.

        Raises: BusyError unless nothing runs or waits, NotServingError if no requests are taken.
        """
        return self.scheduler.flush()

    def fingerprint(self) -> str:
        """Returns what answers depend on besides their requests, as a short name."""
        config = json.dumps(dataclasses.asdict(self.llm.config), sort_keys=True, default=str)
        return f"k26jax-{__version__}-{hashlib.sha256(config.encode()).hexdigest()[:10]}"

    def info(self) -> dict[str, Any]:
        """Returns versions, options and figures."""
        loaded, scheduler = self.llm.engine.loaded, self.scheduler
        kept, room = scheduler.kept_tokens
        return {
            "version": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "device": jax.devices()[0].device_kind,
            "served_model_names": self.settings.served_names,
            "context_length": loaded.context_length,
            "algorithm": loaded.config.algorithm.value,
            "kernels": loaded.plan.kernels,
            "engine": dataclasses.asdict(loaded.config),
            "server": self.settings.shown(),
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "counts": dataclasses.asdict(scheduler.counts),
            "accept_lengths": self.metrics.accept_lengths(),
            "prefix_cache": {"kept_tokens": kept, "tokens": room},
            "rows": self.metrics.rows(),
            "step_costs": loaded.costs and self.llm.step_costs,
        }

    def warn_without_chat(self) -> None:
        """Logs why the model cannot chat, if it cannot."""
        try:
            self.llm.chat_format  # noqa: B018 - reads the folder's template
        except K26Error as error:
            logs.event("no_chat", logging.WARNING, reason=error)


def _ratio(part: tuple[int, int]) -> float:
    return part[0] / part[1] if part[1] else 0.0
