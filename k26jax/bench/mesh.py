"""Steps of a K2.6-shaped model on a mesh, with real all-reduces: equality first, then times."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from k26jax.bench.dummy import dummy_engine, plan_of
from k26jax.bench.programs import rank_config
from k26jax.bench.timing import seconds_a_call
from k26jax.config import DraftConfig, EngineConfig, ModelConfig, RopeConfig
from k26jax.engine.loading import Loaded
from k26jax.engine.request import Request, SamplingParams
from k26jax.engine.runner import Runner
from k26jax.sharding.collectives import sum_over_ranks
from k26jax.sharding.mesh import make_mesh, on_mesh
from k26jax.sharding.rules import MESH_AXES

ACCEPT_LENGTHS = (1, 3, 4, 5, 6)
STEPS = 8
# How XLA is told to add over ranks: left alone it takes a kernel of its own where it can.
ALL_REDUCE_FORMS: dict[str, dict[str, str]] = {
    "XLA's choice": {},
    "NCCL": {"xla_gpu_experimental_use_collective_kernels": ""},
}
CONFIGS = ("kimi-k2.6", "small")


@dataclass(frozen=True)
class Row:
    """One width of verification.

    step_seconds: median over dispatches of STEPS steps, the host's part included.
    all_reduces: in the program of a step.   all_reduce_seconds: of one of them, measured alone.
    """

    width: int
    step_seconds: float
    all_reduces: int
    all_reduce_seconds: float

    def record(self) -> dict[str, object]:
        """Returns the row with what follows from it."""
        speeds = {str(n): n / self.step_seconds for n in ACCEPT_LENGTHS if n <= self.width}
        share = self.all_reduces * self.all_reduce_seconds / self.step_seconds
        return dataclasses.asdict(self) | {
            "all_reduce_share": share,
            "tokens_a_second_at_accept_length": speeds,
        }


@dataclass(frozen=True)
class Check:
    """Whether a model of random weights gives one device's greedy tokens on the mesh.

    equal: tokens before the first that differs.   agree: whether all ranks hold the same state.
    """

    config: str
    layers: int
    kernels: str
    dtype: str
    width: int
    tokens: int
    equal: int
    agree: bool


def models(name: str, layers: int, draft_layers: int) -> tuple[ModelConfig, DraftConfig]:
    """Returns the sizes of Kimi K2.6 and its drafter with fewer layers, or of a small relative."""
    model = dataclasses.replace(
        rank_config(layers),
        vocab_size=163840,
        num_attention_heads=64,
        intermediate_size=18432,
        moe_intermediate_size=2048,
    )
    if name == "small":
        model = dataclasses.replace(
            model,
            vocab_size=4096,
            hidden_size=1024,
            num_attention_heads=16,
            q_lora_rank=512,
            intermediate_size=2048,
            moe_intermediate_size=512,
            n_routed_experts=16,
            num_experts_per_tok=4,
        )
    taps = sorted({round(i * (layers - 1) / 5) for i in range(6)})
    draft = DraftConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=draft_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=model.intermediate_size,
        num_target_layers=layers,
        block_size=8,
        mask_token_id=model.vocab_size - 2,
        target_layer_ids=tuple(taps),
        windows=(None,) * draft_layers,
        causal=(False,) * draft_layers,
        rms_norm_eps=1e-5,
        rope=RopeConfig(50000.0),
    )
    return model, draft


def check(
    name: str, layers: int, tp_size: int, ep_size: int, kernels: str, dtype: str, width: int
) -> Check:
    """Returns how far a model's greedy tokens on the mesh are those of one device.

    The experts' weights are made in canonical order here, so both run the same model; one device
    holds all of them and, for a moment, one of their products twice.
    """
    model, draft = models(name, layers, draft_layers=1)
    found, agree = [], True
    for sizes in ((1, 1), (tp_size, ep_size)):
        config = _options(*sizes, context=128, kernels=kernels)
        plan, _ = plan_of(width, draft, kernels)
        loaded = dummy_engine(
            config, model, draft if width > 1 else None, plan, dtype, is_canonical=True
        )
        runner = Runner(loaded)
        runner.restore()
        request = _request(range(7, 23), max_tokens=64)
        tokens = [runner.prefill(0, request)]
        while len(tokens) < request.max_tokens:
            steps = runner.run(STEPS)
            for step in range(int(steps.n_run)):
                tokens += steps.tokens[step, 0, : steps.emitted_len[step, 0]].tolist()
        found.append(tokens)
        agree = ranks_agree(runner)
        runner.close()
    pairs = zip(*found, strict=True)
    equal = next((n for n, (a, b) in enumerate(pairs) if a != b), len(found[0]))
    return Check(name, layers, kernels, dtype, width, len(found[0]), equal, agree)


def ranks_agree(runner: Runner) -> bool:
    """Whether the devices of this process hold the same bits of what is whole on each of them."""
    state = runner.state
    whole = (state.cache, state.anchor, state.length, state.remaining)
    for leaf in jax.tree.leaves(whole):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        if any(first.tobytes() != other.tobytes() for other in others):
            return False
    return True


def measure(
    model: ModelConfig,
    draft: DraftConfig,
    widths: Sequence[int],
    *,
    tp_size: int,
    ep_size: int,
    context: int,
    kernels: str,
    dtype: str,
    dispatches: int = 10,
) -> Iterator[Row]:
    """Yields a row for each width as soon as it is measured; the weights are made once.

    The cache holds `context` tokens that no prompt gave: zeros cost what others do.
    """
    plans = [plan_of(width, draft, kernels)[0] for width in widths]
    room = context + (dispatches + 2) * STEPS * (draft.depth + 1) + max(widths)
    config = _options(tp_size, ep_size, context=-(-room // 256) * 256, kernels=kernels)
    loaded = dummy_engine(config, model, draft, plans[-1], dtype)
    for width, plan in zip(widths, plans, strict=True):
        runner = Runner(dataclasses.replace(loaded, plan=plan))
        runner.restore()
        runner.occupy(0, length=context, max_tokens=1 << 20)
        seconds = []
        for turn in range(dispatches + 2):
            begun = time.perf_counter()
            steps = runner.run(STEPS)
            if turn > 1:
                seconds.append((time.perf_counter() - begun) / int(steps.n_run))
        text = runner.program_text("steps")
        runner.close()
        yield Row(
            width,
            statistics.median(seconds),
            len(re.findall(r"= [^=\n]* all-reduce(?:-start)?\(", text)),
            all_reduce_seconds(loaded, width, model.hidden_size),
        )


def all_reduces(
    tp_size: int, ep_size: int, width: int, rows: Sequence[int]
) -> Iterator[tuple[str, int, float]]:
    """Yields form, bytes and seconds of one sum of float32 [n, width] for each n of `rows`.

    Zero seconds on one device.
    """
    mesh = make_mesh(tp_size, ep_size)
    for count, (form, options) in itertools.product(rows, ALL_REDUCE_FORMS.items()):
        yield form, 4 * count * width, _seconds_of_a_sum(mesh, count, width, options)


def all_reduce_seconds(loaded: Loaded, rows: int, width: int) -> float:
    """Returns the seconds of one sum of float32 [rows, width] over all ranks; 0 on one device."""
    mesh = None if loaded.placement is None else loaded.placement.mesh
    return _seconds_of_a_sum(mesh, rows, width, {})


def _seconds_of_a_sum(mesh: Mesh | None, rows: int, width: int, options: dict[str, str]) -> float:
    if mesh is None:
        return 0.0
    whole = PartitionSpec()

    def one(x: jax.Array) -> jax.Array:
        return sum_over_ranks(x, *MESH_AXES) / mesh.size

    call = on_mesh(one, mesh, whole, whole)
    x = jax.device_put(jnp.ones((rows, width)), jax.NamedSharding(mesh, whole))
    return seconds_a_call(lambda _, x: call(x), x, options=options)


def _options(tp_size: int, ep_size: int, *, context: int, kernels: str) -> EngineConfig:
    return EngineConfig(
        model_path="dummy",
        tp_size=tp_size,
        ep_size=ep_size,
        context_length=context,
        kernels=kernels,
        steps_per_dispatch=STEPS,
        chunked_prefill_size=32,
    )


def _request(prompt: Sequence[int], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0, ignore_eos=True)
    return Request(tuple(prompt), params, max_tokens, stop_ids=(), seed=0)
