"""A reference model of the golden folder, and its programs, each compiled once a session."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from fixtures.quick import quick_jit

from k26jax.checkpoint.load import load_params
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.config import ModelConfig, Quantization, RopeConfig
from k26jax.model.cache import LatentCache
from k26jax.model.layers import contract, rms_norm
from k26jax.model.mla import Context
from k26jax.model.parameters import abstract, bind
from k26jax.model.target import Rows, Target
from k26jax.pallas.norm import append

CHUNK = 16
# Pieces of a prompt in turn; each sequence starts elsewhere in the list.
PIECES = (5, 16, 1, 11, 16, 2, 7)


class Case(NamedTuple):
    """One sequence of the golden data."""

    ids: np.ndarray
    positions: np.ndarray
    logits: np.ndarray


class Probe(NamedTuple):
    """What the expanded form computes on the way; lists run over layers or MoE layers."""

    logits: jax.Array
    hidden: jax.Array
    outputs: list[jax.Array]
    attn_out: list[jax.Array]
    mlp_out: list[jax.Array]
    c_kv: list[jax.Array]
    k_pe: list[jax.Array]
    router_logits: list[jax.Array]
    topk_ids: list[jax.Array]
    topk_weights: list[jax.Array]


class Decoded(NamedTuple):
    """What the absorbed form computes over a cache, by sequence; greedy_*: of the first one."""

    logits: list[np.ndarray]
    features: list[np.ndarray]
    c_kv: list[np.ndarray]
    k_pe: list[np.ndarray]
    greedy_ids: np.ndarray
    greedy_logits: np.ndarray


@dataclass(frozen=True)
class GivenRope(RopeConfig):
    """A rope whose frequencies are given, possibly traced."""

    given: Any = None

    def inv_freq(self, dim: int) -> Any:
        assert self.given.shape == (dim // 2,)
        return self.given


class GoldenModel:
    """A golden folder: config, float32 parameters, arrays, and results by case name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = ModelConfig.from_folder(folder)
        self.module = abstract(lambda rngs: Target(self.config, dtype=jnp.float32, rngs=rngs))
        n_layers = self.config.num_hidden_layers
        with open_checkpoint(folder, num_hidden_layers=n_layers) as checkpoint:
            self.params = load_params(checkpoint, self.module)
        self.expected = self.read("expected")
        self.debug = self.read("debug")
        # The last layer first: its tap is the one exception.
        self.taps = (n_layers - 1, *range(n_layers - 1))

    def read(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of one file; none where there is no such file."""
        path = self.folder / f"{name}.npz"
        if not path.is_file():
            return {}
        with np.load(path) as arrays:
            return dict(arrays)

    @functools.cached_property
    def plain_cases(self) -> dict[str, Case]:
        """The prompt and the sequences of batch2.npz, all at positions 0, 1, 2..."""
        batch = self.read("batch2")
        cases = {"prompt": (self.expected["input_ids"], self.expected["logits"])}
        for i, n in enumerate(batch.get("lengths", ())):
            cases[f"batch{i}"] = (batch["input_ids"][i, :n], batch["logits"][i, :n])
        return {k: Case(ids, np.arange(ids.size), out) for k, (ids, out) in cases.items()}

    @functools.cached_property
    def position_cases(self) -> dict[str, Case]:
        """The cases of positions.npz."""
        arrays = self.read("positions")
        names = [key.removesuffix(".input_ids") for key in arrays if key.endswith(".input_ids")]
        fields = ("input_ids", "position_ids", "logits")
        return {name: Case(*(arrays[f"{name}.{field}"] for field in fields)) for name in names}

    def inv_freq(self) -> np.ndarray:
        return self.config.rope.inv_freq(self.config.qk_rope_head_dim)

    @functools.cached_property
    def own(self) -> dict[str, Probe]:
        """The expanded form of every case with the model's own frequencies."""
        return self._probe_all(self.inv_freq())

    @functools.cached_property
    def stored(self) -> dict[str, Probe]:
        """The same with the frequencies of the golden data."""
        return self._probe_all(self.debug["inv_freq"])

    @functools.cached_property
    def from_nan(self) -> Decoded:
        """The absorbed form over a cache that holds NaN before anything is written."""
        return self._decode(np.nan)

    @functools.cached_property
    def from_zeros(self) -> Decoded:
        """The absorbed form over a cache of zeros."""
        return self._decode(0.0)

    def expanded_logits(self, config: ModelConfig, params) -> np.ndarray:
        """The prompt's logits [t, w] of another model of this shape."""
        module = abstract(lambda rngs: Target(config, dtype=jnp.float32, rngs=rngs))
        case = self.plain_cases["prompt"]

        @quick_jit
        def program(params):
            target = bind(module, params)
            visible = jnp.tri(case.ids.size, dtype=bool)[None]
            ids, positions = (jnp.asarray(x, jnp.int32)[None] for x in (case.ids, case.positions))
            hidden, _ = target.forward_expanded(ids, positions, visible)
            return target.logits(hidden)[0]

        return np.asarray(program(params))

    def features_of(self, ids: np.ndarray) -> np.ndarray:
        """The tapped states [t, n * d] of a sequence of its own, run in pieces over a cache."""
        idle = Case(ids[:0], ids[:0], ids[:0])
        cases = [Case(ids, np.arange(ids.size), ids)] + [idle] * (len(self.plain_cases) - 1)
        _, _, features = self._prefill(self._cache(np.nan), cases)
        return features[0]

    def unquantized(self) -> ModelConfig:
        return replace(self.config, quantization=Quantization.NONE)

    def _probe_all(self, inv_freq: np.ndarray) -> dict[str, Probe]:
        cases = self.plain_cases | self.position_cases
        width = max(case.ids.size for case in cases.values())
        ids, positions = np.zeros((2, len(cases), width), np.int32)
        for row, case in enumerate(cases.values()):
            ids[row, : case.ids.size] = case.ids
            positions[row, : case.ids.size] = case.positions
        found = jax.device_get(self._probe(self.params, ids, positions, inv_freq))
        return {
            name: jax.tree.map(lambda x, row=row, n=case.ids.size: x[row, :n], found)
            for row, (name, case) in enumerate(cases.items())
        }

    @functools.cached_property
    def _probe(self):
        def program(params, ids, positions, inv_freq) -> Probe:
            target = bind(self.module, params)
            target.self_attn.config = replace(
                self.config, rope=GivenRope(**vars(self.config.rope), given=inv_freq)
            )
            visible = jnp.broadcast_to(
                jnp.tri(ids.shape[1], dtype=bool), (*ids.shape, ids.shape[1])
            )
            hidden, outputs = target.forward_expanded(ids, positions, visible)
            probe = Probe(target.logits(hidden), hidden, outputs, *([] for _ in range(7)))
            inputs = [target.embed(ids), *outputs[:-1]]
            for layer, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
                self._probe_layer(probe, target, layer, x, out, positions, visible)
            return probe

        return quick_jit(program)

    def _probe_layer(self, probe, target, layer, x, out, positions, visible) -> None:
        eps = self.config.rms_norm_eps
        normed = rms_norm(x, target.input_layernorm[layer], eps)
        attended = target.self_attn.expanded(layer, normed, positions, visible)
        _, _, c_kv, k_pe = target.self_attn.heads(layer, normed, positions)
        probe.attn_out.append(attended)
        probe.mlp_out.append(out - (x + attended))
        probe.c_kv.append(c_kv)
        probe.k_pe.append(k_pe)
        if layer in self.config.moe_layer_ids:
            row = self.config.moe_layer_ids.index(layer)
            rows = rms_norm(x + attended, target.post_attention_layernorm[layer], eps)
            flat = rows.reshape(-1, rows.shape[-1])
            ids, weights = target.moe.routing(row, flat, "reference")
            logits = contract("...d,ed->...e", rows, target.moe.gate[row])
            probe.router_logits.append(logits)
            probe.topk_ids.append(ids.reshape(*rows.shape[:-1], -1))
            probe.topk_weights.append(weights.reshape(*rows.shape[:-1], -1))

    @functools.cached_property
    def _step(self):
        slots = jnp.arange(len(self.plain_cases))[::-1]

        def program(params, cache, ids, start, count) -> tuple[LatentCache, jax.Array, Rows]:
            target = bind(self.module, params)
            offset = jnp.arange(ids.shape[1])
            words = ((2 << offset) - 1).astype(jnp.uint32)[:, None]
            ancestors = jnp.broadcast_to(words, (*ids.shape, 1))
            rows = target.forward(
                ids,
                start[:, None] + offset,
                Context(cache, slots, start, ancestors),
                valid=offset < count[:, None],
                taps=self.taps,
            )
            cache = LatentCache(
                *append((cache.c_kv, cache.k_pe), (rows.c_kv, rows.k_pe), slots, start, count)
            )
            return cache, target.logits(rows.hidden), rows

        return quick_jit(program)

    def _cache(self, fill: float) -> LatentCache:
        cases = self.plain_cases.values()
        capacity = max(case.ids.size for case in cases) + self.expected["greedy_ids"].size
        # Nobody writes the last slot.
        empty = LatentCache.empty(self.config, len(cases) + 1, capacity, jnp.float32)
        return jax.tree.map(lambda x: jnp.full_like(x, fill), empty)

    def _decode(self, fill: float) -> Decoded:
        cases = list(self.plain_cases.values())
        n_new = self.expected["greedy_ids"].size
        cache, logits, features = self._prefill(self._cache(fill), cases)
        start = np.array([case.ids.size for case in cases], np.int32)
        count = np.array([1] + [0] * (len(cases) - 1), np.int32)
        row = logits[0][-1]
        greedy = [(int(row.argmax()), row)]
        while len(greedy) < n_new:
            ids = np.full((len(cases), 1), greedy[-1][0], np.int32)
            cache, out, _ = self._step(self.params, cache, ids, start, count)
            row = np.asarray(out)[0, 0]
            greedy.append((int(row.argmax()), row))
            start = start + count
        host = jax.device_get(cache)
        last = len(cases) - 1
        ids, rows = zip(*greedy, strict=True)
        return Decoded(
            logits,
            features,
            [host.c_kv[:, last - i, : n.ids.size] for i, n in enumerate(cases)],
            [host.k_pe[:, last - i, : n.ids.size] for i, n in enumerate(cases)],
            np.array(ids),
            np.array(rows),
        )

    def _prefill(self, cache, cases):
        start = np.zeros(len(cases), np.int32)
        total = np.array([case.ids.size for case in cases], np.int32)
        logits, features = [[] for _ in cases], [[] for _ in cases]
        turn = 0
        while (start < total).any():
            pieces = [PIECES[(turn + 3 * i) % len(PIECES)] for i in range(len(cases))]
            count = np.minimum(pieces, total - start).astype(np.int32)
            ids = np.zeros((len(cases), CHUNK), np.int32)
            for i, case in enumerate(cases):
                ids[i, : count[i]] = case.ids[start[i] : start[i] + count[i]]
            cache, out, rows = self._step(self.params, cache, ids, start, count)
            out, tapped = jax.device_get((out, rows.features))
            for i in range(len(cases)):
                logits[i].append(out[i, : count[i]])
                features[i].append(tapped[i, : count[i]])
            start, turn = start + count, turn + 1
        joined = [[np.concatenate(parts) for parts in whole] for whole in (logits, features)]
        return cache, *joined


@functools.cache
def golden_model(folder: Path) -> GoldenModel:
    """The model of a folder, shared by all tests of a session."""
    return GoldenModel(folder)
