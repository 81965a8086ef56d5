"""One runner in several processes: process 0's calls are told to the others, which make them too.

All processes run the same programs in the same order, each on its own devices; what a call gives is
the same everywhere, so nothing comes back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from k26jax.engine.loading import Loaded
from k26jax.engine.request import Request, SamplingParams
from k26jax.engine.runner import Runner
from k26jax.engine.step_costs import CostTable
from k26jax.sharding.distributed import Cluster
from k26jax.spec.step import Steps


def make_runner(loaded: Loaded) -> Runner:
    """Returns the runner of this process: a plain one unless it leads others.

    Raises: ClusterError if the processes were not started with the same options.
    """
    cluster = loaded.cluster
    if cluster is None:
        return Runner(loaded)
    own = (
        "process_id", "model_path", "speculative_draft_model_path", "compile_cache_dir",
        "speculative_cost_table",
    )  # fmt: skip
    options = {k: v for k, v in dataclasses.asdict(loaded.config).items() if k not in own}
    cluster.agree("options", options)
    return (LeadingRunner if cluster.leads else JoinedRunner)(loaded, cluster)


class JoinedRunner(Runner):
    """A runner that is ready when those of all processes are."""

    def __init__(self, loaded: Loaded, cluster: Cluster):
        super().__init__(loaded)
        self._cluster = cluster

    def warm_up(self, progress: Callable[[str], None] | None = None) -> None:
        """See `Runner`."""
        super().warm_up(progress)
        self._cluster.agree("programs", {"names": self.programs})


class LeadingRunner(JoinedRunner):
    """A runner that tells the other processes what it does before it does it."""

    def __init__(self, loaded: Loaded, cluster: Cluster):
        super().__init__(loaded, cluster)
        self._is_told = False

    def warm_up_traces(self, *, has_extras: bool = False) -> None:
        """See `Runner`."""
        with self._told("warm_up_traces", has_extras=has_extras):
            super().warm_up_traces(has_extras=has_extras)

    def warm_up_extras(self, progress: Callable[[str], None] | None = None) -> None:
        """See `Runner`."""
        with self._told("warm_up_extras"):
            super().warm_up_extras(progress)

    def warm_up_guided(self, progress: Callable[[str], None] | None = None) -> None:
        """See `Runner`."""
        with self._told("warm_up_guided"):
            super().warm_up_guided(progress)

    def begin(self, slot: int, request: Request) -> None:
        """See `Runner`; programs are compiled before, by a call that may take long."""
        if request.has_extras and "extra_steps" not in self._compiled:
            self.warm_up_extras()
        if request.params.structured_outputs is not None and "settle" not in self._compiled:
            self.warm_up_guided()
        with self._told("begin", slot=slot, request=dataclasses.asdict(request)):
            super().begin(slot, request)

    def prefill_next(self, slot: int) -> int | None:
        """See `Runner`."""
        with self._told("prefill_next", slot=slot):
            return super().prefill_next(slot)

    def flush(self) -> int:
        """See `Runner`."""
        with self._told("flush"):
            return super().flush()

    def run(self, limit: int, *, record_trees: bool = False) -> Steps:
        """See `Runner`."""
        with self._told("run", limit=limit, record_trees=record_trees):
            return super().run(limit, record_trees=record_trees)

    def release(self, slot: int) -> None:
        """See `Runner`."""
        with self._told("release", slot=slot):
            super().release(slot)

    def set_costs(self, costs: CostTable) -> None:
        """See `Runner`; what process 0 measured holds for all, or they would choose unlike."""
        with self._told("set_costs", costs=dataclasses.asdict(costs)):
            super().set_costs(costs)

    def occupy(self, slot: int, *, length: int, max_tokens: int) -> None:
        """See `Runner`."""
        with self._told("occupy", slot=slot, length=length, max_tokens=max_tokens):
            super().occupy(slot, length=length, max_tokens=max_tokens)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """See `Runner`."""
        with self._told("logits", token_ids=[int(token) for token in token_ids]):
            return super().logits(token_ids)

    def reset(self) -> None:
        """See `Runner`; an interrupt loses this process's part of the state, so all start anew."""
        with self._told("reset"):
            super().reset()

    def close(self) -> None:
        """See `Runner`; the other processes end."""
        with self._told("close"):
            super().close()

    @contextlib.contextmanager
    def _told(self, name: str, **arguments: Any) -> Iterator[None]:
        # What a call calls in its turn, the others call too.
        if self._is_told or self._is_closed:
            yield
            return
        self._is_told = True
        try:
            with self._cluster.call(name, arguments):
                yield
        finally:
            self._is_told = False


def follow(runner: Runner, cluster: Cluster) -> None:
    """Makes the calls that process 0 tells of, until it closes its runner.

    Raises: ClusterError if a process of the run is lost.
    """
    name = ""
    while name != "close":
        name, arguments = cluster.hear()
        with cluster.working(name):
            _CALLS[name](runner, **arguments)


def _begin(runner: Runner, slot: int, request: dict[str, Any]) -> None:
    settings = request | {
        "params": SamplingParams(**request["params"]),
        "prompt_token_ids": tuple(request["prompt_token_ids"]),
        "stop_ids": tuple(request["stop_ids"]),
        "bad_words": tuple(map(tuple, request["bad_words"])),
    }
    runner.begin(slot, Request(**settings))


def _set_costs(runner: Runner, costs: dict[str, Any]) -> None:
    runner.set_costs(CostTable(**costs))


_CALLS: dict[str, Callable[..., Any]] = {
    "warm_up_traces": Runner.warm_up_traces,
    "warm_up_extras": Runner.warm_up_extras,
    "warm_up_guided": Runner.warm_up_guided,
    "begin": _begin,
    "prefill_next": Runner.prefill_next,
    "flush": Runner.flush,
    "run": Runner.run,
    "release": Runner.release,
    "set_costs": _set_costs,
    "occupy": Runner.occupy,
    "logits": Runner.logits,
    "reset": Runner.reset,
    "close": Runner.close,
}
