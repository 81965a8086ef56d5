"""The performance model: seconds of a step from its bytes, operations, kernels and messages.

A kernel takes its launch and the longer of reading its bytes and computing; attention over the
cache adds time by position and row; sums over ranks are added whole, nothing hides them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k26jax.bench.acceptance import chain_rate, tree_accept_length
from k26jax.bench.costs import HOSTS, AllReduce, Card, Costs
from k26jax.bench.step_parts import (
    Load,
    Part,
    Ranks,
    draft_parts,
    draft_token_bytes,
    end_parts,
    rank_weight_bytes,
    target_parts,
    token_bytes,
)
from k26jax.config import DraftConfig, ModelConfig

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_ROW_HEADS = 8  # heads of one row that `Costs.key_seconds` is for
_F32 = 4
_CACHE_RATE = 4  # of the card's cache, in units of its memory's rate
_SAMPLES = 200


@dataclass(frozen=True)
class Setting:
    """What is predicted.

    draft: None for plain decoding only.
    gpus: tp_size x ep_size of them, on `hosts` hosts.
    users: sequences at once; each has `context` cached tokens.
    accept_length: tokens a step that the drafter's whole chain gives.
    routing: measured distinct experts of a layer by rows of a step; None: independent choices.
    waits: whether ranks of EP wait for the one with the most experts to read; else each has the
      mean.
    """

    model: ModelConfig
    draft: DraftConfig | None
    card: Card
    all_reduce: AllReduce
    costs: Costs
    tp_size: int
    ep_size: int = 1
    hosts: int = 1
    context: int = 4096
    users: int = 1
    accept_length: float = 4.0
    routing: tuple[tuple[int, float], ...] | None = None
    waits: bool = True

    @property
    def ranks(self) -> Ranks:
        """How the model is shared."""
        return Ranks(self.tp_size, self.ep_size)


@dataclass(frozen=True)
class Step:
    """One predicted width.

    stage_seconds: of one rank alone.   kernels, n_bytes: of one rank.
    message_seconds: of all sums and gathers over ranks.
    host_seconds: between dispatches.
    touched: distinct experts of a layer that the busiest rank reads.
    tokens: of one sequence, by the accept length.
    floor_seconds: of plainly reading the bytes.
    step_factor: one program of all stages over the stages one by one.
    """

    width: int
    stage_seconds: dict[str, float]
    message_seconds: float
    host_seconds: float
    kernels: int
    n_bytes: float
    touched: float
    tokens: float
    floor_seconds: float
    step_factor: float = 1.0

    @property
    def rank_seconds(self) -> float:
        """Seconds of one rank without messages and host."""
        return sum(self.stage_seconds.values()) * self.step_factor

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.rank_seconds + self.message_seconds + self.host_seconds

    def tokens_a_second(self, tokens: float | None = None) -> float:
        """Returns the tokens a second of one sequence, at another accept length if given."""
        return (self.tokens if tokens is None else tokens) / self.seconds


def predict(setting: Setting, width: int) -> Step:
    """Returns what a step of `width` rows takes; 1 is plain decoding."""
    model, ranks, costs = setting.model, setting.ranks, setting.costs
    parts, load = _parts(setting, width)
    stages: dict[str, float] = {}
    for part in parts:
        seconds = _launch_seconds(setting, part) + _work_seconds(setting, part)
        stages[part.stage] = stages.get(part.stage, 0.0) + seconds
    stages["verify"] += model.num_hidden_layers * _attention_seconds(setting, width)
    stages = {name: seconds * costs.factor(name) for name, seconds in stages.items()}
    read = sum(part.n_bytes for part in parts)
    return Step(
        width=width,
        stage_seconds=stages,
        message_seconds=_message_seconds(setting, width) if ranks.several else 0.0,
        host_seconds=costs.host_seconds,
        kernels=round(sum(part.launches for part in parts)),
        n_bytes=read,
        touched=load.touched,
        tokens=_tokens(setting, width),
        floor_seconds=read / setting.card.read_bytes_a_second,
        step_factor=costs.factor("step"),
    )


def best(steps: Sequence[Step]) -> Step:
    """Returns the width that gives the most tokens a second."""
    return max(steps, key=lambda step: step.tokens_a_second())


def rank_bytes(setting: Setting) -> dict[str, float]:
    """Returns what each GPU holds: weights and caches."""
    model, draft, ranks = setting.model, setting.draft, setting.ranks
    tokens = setting.users * setting.context
    cache = tokens * token_bytes(model)
    if draft is not None:
        cache += tokens * draft_token_bytes(draft, ranks)
    return {"weights": rank_weight_bytes(model, draft, ranks), "cache": cache}


def touched_experts(setting: Setting, rows: int) -> float:
    """Returns the distinct experts of a layer that the busiest rank reads for so many rows."""
    model, ep_size = setting.model, setting.ep_size
    if setting.routing:
        widths, touched = zip(*setting.routing, strict=True)
        whole = float(np.interp(rows, widths, touched))
    else:
        chosen = model.num_experts_per_tok / model.n_routed_experts
        whole = model.n_routed_experts * (1 - (1 - chosen) ** rows)
    if ep_size == 1 or not setting.waits:
        return whole / ep_size
    mean, busiest = _busiest(model.n_routed_experts, model.num_experts_per_tok, rows, ep_size)
    return whole / ep_size * busiest / mean


@functools.cache
def _busiest(n_experts: int, chosen: int, rows: int, ep_size: int) -> tuple[float, float]:
    """Returns mean and greatest number of distinct experts of a rank, of simulated choices."""
    rng = np.random.default_rng(0)
    keys = rng.random((_SAMPLES, rows, n_experts), np.float32)
    ids = np.argpartition(keys, chosen, axis=-1)[..., :chosen].reshape(_SAMPLES, -1)
    is_touched = np.zeros((_SAMPLES, n_experts), bool)
    np.put_along_axis(is_touched, ids, True, axis=1)
    counts = is_touched.reshape(_SAMPLES, ep_size, -1).sum(axis=-1)
    return float(counts.mean()), float(counts.max(axis=1).mean())


def part_seconds(setting: Setting, width: int, stage: str) -> tuple[float, float, float]:
    """Returns what launches, the experts' work and all else take in a stage, factors aside."""
    parts = [part for part in _parts(setting, width)[0] if part.stage == stage]
    launches = sum(_launch_seconds(setting, part) for part in parts)
    is_moe = [part.family.endswith("_moe") for part in parts]
    worked = [_work_seconds(setting, part) for part in parts]
    experts = sum(seconds for seconds, of in zip(worked, is_moe, strict=True) if of)
    rest = sum(worked) - experts
    if stage == "verify":
        rest += setting.model.num_hidden_layers * _attention_seconds(setting, width)
    return launches, experts, rest


def _parts(setting: Setting, width: int) -> tuple[list[Part], Load]:
    model, draft, ranks = setting.model, setting.draft, setting.ranks
    touched = touched_experts(setting, width * setting.users)
    load = Load(width, setting.users, setting.context, touched)
    parts = [*target_parts(model, ranks, load), *end_parts(model, ranks, load)]
    if draft is not None and width > 1:
        parts += draft_parts(model, draft, ranks, load)
    return parts, load


def _launch_seconds(setting: Setting, part: Part) -> float:
    return part.launches * setting.costs.launch_seconds[part.family]


def _work_seconds(setting: Setting, part: Part) -> float:
    """Returns the seconds of a part's bytes or operations, whichever take longer."""
    if part.family == "tree_mla":
        return 0.0  # its time by position and row holds its bytes
    card, rate = setting.card, setting.card.read_bytes_a_second
    read = part.n_bytes * (1 + (part.passes - 1) / _CACHE_RATE) / rate
    return max(
        read / setting.costs.efficiency[part.family], part.operations / card.operations_a_second
    )


def _attention_seconds(setting: Setting, width: int) -> float:
    """Returns the seconds of one layer's attention over the cache beside its launch."""
    costs = setting.costs
    heads = setting.model.num_attention_heads / setting.tp_size
    rows = width * heads / _ROW_HEADS
    fixed, each = costs.key_seconds
    keys = setting.users * setting.context
    slower = costs.read_bytes_a_second / setting.card.read_bytes_a_second
    return setting.users * rows * costs.row_seconds + keys * (fixed + rows * each) * slower


def _message_seconds(setting: Setting, width: int) -> float:
    model, draft = setting.model, setting.draft

    def one(rows: int, columns: int) -> float:
        n_bytes = rows * columns * _F32
        between = HOSTS.seconds(n_bytes) if setting.hosts > 1 else 0.0
        return setting.all_reduce.seconds(n_bytes) + between

    rows = width * setting.users
    tp_size = setting.tp_size
    # Attention and feed-forward of each layer, and the embedding; with one rank of TP the experts'.
    sums = 2 * model.num_hidden_layers + 1 if tp_size > 1 else len(model.moe_layer_ids)
    seconds = sums * one(rows, model.hidden_size)
    seconds += one(rows, 2) if tp_size > 1 else 0.0
    if draft is not None and width > 1 and tp_size > 1:
        block = draft.block_size * setting.users
        cut = setting.ranks.draft_ranks(draft) > 1
        seconds += (2 * draft.num_hidden_layers * cut + 1) * one(block, draft.hidden_size)
        # The features' projection, of the rows that may be committed.
        seconds += cut * one((draft.depth + 1) * setting.users, draft.hidden_size)
        seconds += 2 * one(draft.depth * setting.users, 2 * width)
    return seconds


def _tokens(setting: Setting, width: int) -> float:
    draft = setting.draft
    if draft is None or width == 1:
        return 1.0
    rate = chain_rate(setting.accept_length, draft.depth)
    return tree_accept_length(rate, draft.depth, width - 1)


def alone(setting: Setting) -> Setting:
    """Returns the setting without messages: what `bench rank` measures."""
    silent = AllReduce("none", ((0, 0.0),), "one rank alone")
    return dataclasses.replace(setting, all_reduce=silent, hosts=1, waits=False)
