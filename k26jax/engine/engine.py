"""The engine: any number of requests through a fixed number of slots, one caller at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence

import numpy as np

from k26jax.engine.cluster import follow, make_runner
from k26jax.engine.loading import Loaded
from k26jax.engine.output import StreamChunk
from k26jax.engine.request import Request
from k26jax.engine.runner import Runner
from k26jax.engine.slots import Slots
from k26jax.errors import RequestError

_BUSY = (
    "another run of this LLM is in progress, such as a stream that is not read to its end; finish "
    "or close it first"
)

_FOLLOWS = "this process follows process 0, which takes the requests; call follow() here"


class Engine:
    """Runs requests on the slots of one runner, first come first served, one run at a time."""

    def __init__(self, loaded: Loaded, runner: Runner | None = None):
        self.loaded = loaded
        self.runner = make_runner(loaded) if runner is None else runner
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
        with self.take_slots() as slots:
            while is_more or slots:
                for _ in range(slots.free):
                    item = next(waiting, None)
                    is_more = item is not None
                    if item is None:
                        break
                    yield slots.admit(*item)
                if slots:
                    yield from slots.advance(limit, trace=trace)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Returns the target's logits after each token, float32 [t, w].

        Raises: RequestError if a run is in progress.
        """
        with self.take_slots():
            return self.runner.logits(token_ids)

    @contextlib.contextmanager
    def take_slots(self) -> Iterator[Slots]:
        """Gives the caller all slots; those that it leaves busy are freed.

        Raises: RequestError if somebody else has them.
        """
        if not self.loaded.leads:
            raise RequestError(_FOLLOWS)
        if not self._in_use.acquire(blocking=False):
            raise RequestError(_BUSY)
        slots = Slots(self.runner, self.loaded.tokenizer)
        try:
            self.runner.restore()
            yield slots
        finally:
            try:
                slots.abort_all()
            finally:
                self._in_use.release()
