"""`k26jax bench rank`: the steps of one rank of a mesh, on one device, against their bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from k26jax.bench.dummy import plan_of
from k26jax.bench.launches import by_stage, launched, per_layer
from k26jax.bench.one_rank import rank_engine
from k26jax.bench.stages import Stages
from k26jax.bench.step_bytes import stage_bytes
from k26jax.config import DraftConfig, EngineConfig, ModelConfig
from k26jax.engine.loading import Loaded
from k26jax.engine.runner import Runner
from k26jax.errors import ConfigError

ALGORITHMS = ("NONE", "DDTREE")
STEPS = 8
# What is known first if the machine's time ends early.
_FIRST = (1, 16, 8, 32, 4, 64, 2)
_UNLIMITED = 1 << 30
_SHORT = 2


@dataclass(frozen=True)
class StageRow:
    """One stage of one step.

    kernels: launches in the program of the whole step.
    heap_seconds: of tree_build, what the published heap builder takes on the host; else 0.
    """

    algorithm: str
    width: int
    stage: str
    seconds: float
    kernels: int
    n_bytes: int
    heap_seconds: float = field(default=0.0, kw_only=True)

    def floor_seconds(self, bytes_a_second: float) -> float:
        """Returns the time in which the bytes alone could be read."""
        return self.n_bytes / bytes_a_second


@dataclass(frozen=True)
class StepRow(StageRow):
    """A whole step as the engine runs it, and what it did.

    seconds: median over dispatches of STEPS steps, the host's part included.
    layer_kernels: launches of an MoE layer, mean.
    host_share: part of the step in which the device waits for the host.
    touched, independent: distinct experts of a layer that this rank holds and the step's rows
      chose, and as many as independent choices would be expected to be.
    different_tokens: in a tree, mean.
    accept_length: tokens a step of this random pair, mean.
    """

    layer_kernels: float
    host_share: float
    touched: float
    independent: float
    different_tokens: float
    accept_length: float


@dataclass(frozen=True)
class TokensRow:
    """How many greedy tokens of a width are those of plain decoding before the first other one."""

    algorithm: str
    width: int
    tokens: int
    equal: int


Row = StepRow | StageRow | TokensRow


@dataclass(frozen=True)
class Job:
    """What is measured.

    widths: rows of a verification; 1 is plain decoding, whatever the algorithm.
    check_tokens: greedy tokens to compare with plain decoding's; 0: none.
    """

    model: ModelConfig
    draft: DraftConfig
    tp_size: int
    ep_size: int
    context: int
    widths: tuple[int, ...]
    algorithms: tuple[str, ...]
    kernels: str
    dtype: str = "bfloat16"
    check_tokens: int = 0
    dispatches: int = 8

    def turns(self) -> list[int]:
        """Returns the widths in the order they are measured.

        Raises: ConfigError if there are none.
        """
        wanted = {1} if "NONE" in self.algorithms else set()
        if "DDTREE" in self.algorithms:
            wanted |= {width for width in self.widths if width > 1}
        if not wanted:
            raise ConfigError(
                f"nothing to measure: algorithm {', '.join(self.algorithms)} at width "
                f"{', '.join(map(str, self.widths))}; plain decoding (NONE) has width 1, trees "
                "(DDTREE) have 2 and more"
            )
        order = {width: place for place, width in enumerate(_FIRST)}
        return sorted(wanted, key=lambda width: (order.get(width, len(order)), width))

    @property
    def capacity(self) -> int:
        """Cache rows: the context, what is decoded from there, and a tree beside it."""
        timed = (self.dispatches + 2) * STEPS * (self.draft.depth + 1)
        longest = max(timed, self.check_tokens + self.draft.depth)
        return -(-(self.context + longest + max(self.widths)) // 256) * 256


def measure(job: Job) -> Iterator[Row]:
    """Yields rows as they are measured; the weights are made once.

    Raises: MeshError or CapacityError if ranks cannot share the model or the device has no room.
    """
    turns = job.turns()
    loaded = _engine(job)
    plain: list[int] | None = None
    for width in turns:
        plan, algorithm = plan_of(width, job.draft, job.kernels)
        turn = _Turn(job, replace(loaded, plan=plan), algorithm.value, width)
        yield from turn.rows()
        tokens = turn.tokens(job.check_tokens) if job.check_tokens else []
        turn.close()
        if width == 1:
            plain = tokens
        elif plain:
            pairs = enumerate(zip(tokens, plain, strict=True))
            equal = next((n for n, (a, b) in pairs if a != b), len(plain))
            yield TokensRow(algorithm.value, width, len(plain), equal)


def independent_experts(config: ModelConfig, ep_size: int, rows: int) -> float:
    """Returns the distinct experts of a rank that rows are expected to choose independently."""
    held = config.n_routed_experts // ep_size
    missed = (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows
    return held * (1 - missed)


class _Turn:
    """The measurement of one width."""

    def __init__(self, job: Job, loaded: Loaded, algorithm: str, width: int):
        self._job, self._loaded = job, loaded
        self._algorithm, self._width = algorithm, width
        self._runner = Runner(loaded)

    def rows(self) -> Iterator[Row]:
        """Yields the step, then its stages."""
        job, config = self._job, self._job.model
        stages = Stages(self._loaded)
        self._restart()
        routing = stages.routing(self._runner.state, STEPS)
        paths = launched(self._runner.program_text("steps"))
        n_bytes = stage_bytes(self._loaded, job.context, routing.touched)
        long, emitted = self._dispatch_seconds(STEPS)
        short, _ = self._dispatch_seconds(_SHORT)
        device = (long - short) / (STEPS - _SHORT)
        seconds = long / STEPS
        name = {"algorithm": self._algorithm, "width": self._width}
        yield StepRow(
            **name,
            stage="step",
            seconds=seconds,
            kernels=len(paths),
            n_bytes=sum(n_bytes.values()),
            layer_kernels=per_layer(paths, config.moe_layer_ids),
            host_share=max(1 - device / seconds, 0.0),
            touched=routing.touched,
            independent=independent_experts(config, job.ep_size, self._width),
            different_tokens=routing.different_tokens,
            accept_length=emitted / STEPS,
        )
        kernels = by_stage(paths)
        self._restart()
        for stage, seconds in stages.seconds(self._runner.state):
            heap = stages.heap_seconds(self._runner.state) if stage == "tree_build" else 0.0
            yield StageRow(
                **name,
                stage=stage,
                seconds=seconds,
                kernels=kernels[stage],
                n_bytes=n_bytes[stage],
                heap_seconds=heap,
            )

    def tokens(self, count: int) -> list[int]:
        """Returns the first greedy tokens from the common state."""
        self._restart()
        found: list[int] = []
        while len(found) < count:
            steps = self._runner.run(STEPS)
            for step in range(int(steps.n_run)):
                emitted = int(steps.emitted_len[step, 0])
                found += np.asarray(steps.tokens[step, 0, :emitted]).tolist()
        return found[:count]

    def close(self) -> None:
        """Frees the state and the programs."""
        self._runner.close()

    def _restart(self) -> None:
        """Puts the state back to the one that all widths begin at, ready on the device."""
        self._runner.reset()
        self._runner.occupy(0, length=self._job.context, max_tokens=_UNLIMITED)
        jax.block_until_ready(self._runner.state)

    def _dispatch_seconds(self, n_steps: int) -> tuple[float, float]:
        """Returns the median seconds of dispatches of some steps, and the tokens of one, mean.

        One after the other, as while text is generated: the state stays in its place, and the
        context grows by what is accepted. A state in a new place costs a dispatch milliseconds.
        """
        times, emitted = [], []
        self._restart()
        for turn in range(self._job.dispatches + 2):
            begun = time.perf_counter()
            steps = self._runner.run(n_steps)
            if turn >= 2:
                times.append(time.perf_counter() - begun)
                emitted.append(int(np.sum(steps.emitted_len)))
        return statistics.median(times), statistics.fmean(emitted)


def _engine(job: Job) -> Loaded:
    config = EngineConfig(
        model_path="dummy",
        tp_size=job.tp_size,
        ep_size=job.ep_size,
        context_length=job.capacity,
        kernels=job.kernels,
        dtype=job.dtype,
        steps_per_dispatch=STEPS,
    )
    plan, _ = plan_of(max(job.turns()), job.draft, job.kernels)
    draft = job.draft if plan.drafts else None
    return rank_engine(config, job.model, draft, plan)


def share_of_small_stages(rows: Sequence[Row]) -> float | None:
    """Returns draft, tree_build, accept and compact of one width as a part of its step."""
    steps = [row for row in rows if isinstance(row, StepRow)]
    small = [row.seconds for row in rows if isinstance(row, StageRow) and row.stage in _SMALL]
    return sum(small) / steps[0].seconds if steps and small else None


_SMALL = ("draft", "tree_build", "accept", "compact")
