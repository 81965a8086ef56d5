"""`k26jax bench prefill`: a chunk of a prompt on one rank of a mesh, on one device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from k26jax.bench.dummy import plan_of
from k26jax.bench.one_rank import rank_engine
from k26jax.bench.step_bytes import HeldBytes
from k26jax.config import DraftConfig, EngineConfig, ModelConfig
from k26jax.engine.runner import Runner

_DRAFT_WIDTH = 16
_REPEATS = 5
_IN_A_ROW = 3


@dataclass(frozen=True)
class PrefillRow:
    """One chunk behind a context, the target's pass and what the drafter keeps of it.

    seconds: of a chunk among several that follow one another, median.
    dense, experts, attention: multiplications and additions of this rank, of the target.
    """

    chunk: int
    context: int
    seconds: float
    dense: int
    experts: int
    attention: int

    @property
    def operations(self) -> int:
        """All of them."""
        return self.dense + self.experts + self.attention

    @property
    def tokens_a_second(self) -> float:
        """Prompt tokens."""
        return self.chunk / self.seconds


@dataclass(frozen=True)
class PrefillJob:
    """What is measured: every chunk size behind every context, on one rank."""

    model: ModelConfig
    draft: DraftConfig
    tp_size: int
    ep_size: int
    chunks: tuple[int, ...]
    contexts: tuple[int, ...]
    kernels: str
    dtype: str = "bfloat16"

    @property
    def capacity(self) -> int:
        """Cache rows: the longest context and the largest chunk."""
        return -(-(max(self.contexts) + max(self.chunks) + _DRAFT_WIDTH) // 256) * 256


def measure(job: PrefillJob) -> Iterator[PrefillRow]:
    """Yields rows as they are measured; the weights are made once.

    Raises: MeshError or CapacityError if ranks cannot share the model or the device has no room.
    """
    plan, _ = plan_of(_DRAFT_WIDTH, job.draft, job.kernels)
    config = EngineConfig(
        model_path="dummy",
        tp_size=job.tp_size,
        ep_size=job.ep_size,
        context_length=job.capacity,
        kernels=job.kernels,
        dtype=job.dtype,
    )
    loaded = rank_engine(config, job.model, job.draft, plan)
    held = HeldBytes.of(loaded)
    for chunk in job.chunks:
        runner = Runner(replace(loaded, config=replace(config, chunked_prefill_size=chunk)))
        runner.restore()
        for context in job.contexts:
            seconds = _seconds(runner, chunk, context)
            yield PrefillRow(chunk, context, seconds, **operations(job, held, chunk, context))
        runner.close()


def operations(job: PrefillJob, held: HeldBytes, chunk: int, context: int) -> dict[str, int]:
    """Returns a chunk's multiplications and additions by kind; attention absorbed, over latents."""
    model = job.model
    element = np.dtype("float16").itemsize if job.dtype != "float32" else 4
    each = 3 * model.hidden_size * model.moe_intermediate_size // job.tp_size
    chosen = model.num_experts_per_tok * len(model.moe_layer_ids) / job.ep_size
    pairs = chunk * context + chunk * (chunk + 1) // 2
    heads = model.num_attention_heads // job.tp_size
    a_pair = 2 * model.kv_lora_rank + model.qk_rope_head_dim
    return {
        "dense": 2 * chunk * held.target // element,
        "experts": int(2 * chunk * chosen * each),
        "attention": 2 * pairs * heads * a_pair * model.num_hidden_layers,
    }


def _seconds(runner: Runner, chunk: int, context: int) -> float:
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 1000, chunk)]
    times: list[float] = []
    for turn in range(_REPEATS + 1):
        begun = time.perf_counter()
        for _ in range(_IN_A_ROW):
            runner.put(0, tokens, start=context)
        jax.block_until_ready(runner.state)
        if turn:
            times.append((time.perf_counter() - begun) / _IN_A_ROW)
    return statistics.median(times)


def lines(rows: Sequence[PrefillRow], operations_a_second: float) -> list[str]:
    """Returns the rows as text, each with its part of the rate at which matrices are multiplied."""
    return [
        f"chunk {row.chunk:5} behind {row.context:6} tokens: {row.seconds * 1e3:8.2f} ms, "
        f"{row.tokens_a_second:8.0f} tokens/s, {row.operations / row.seconds / 1e12:6.1f} TFLOP/s, "
        f"{row.operations / row.seconds / operations_a_second:4.0%} of XLA's matrix rate "
        f"(dense {row.dense / 1e12:.2f}, experts {row.experts / 1e12:.2f}, "
        f"attention {row.attention / 1e12:.2f} TFLOP)"
        for row in rows
    ]
