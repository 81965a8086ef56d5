"""The five stages of a step as programs of their own: their times, and the experts they use."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from k26jax.bench.heap_tree import heap_seconds
from k26jax.bench.one_rank import OneRank
from k26jax.bench.timing import touched
from k26jax.engine.loading import Loaded
from k26jax.engine.runner import compile_options
from k26jax.model.parameters import Params, bind
from k26jax.model.target import Rows, Target
from k26jax.spec.accept import Accepted, accept
from k26jax.spec.compact import compact
from k26jax.spec.draft import DraftLogProbs, draft
from k26jax.spec.state import Models, SpecState
from k26jax.spec.tree import Tree
from k26jax.spec.tree_build import tree_build
from k26jax.spec.verify import TreeLogits, verify

_IN_A_ROW = 6
_REPEATS = 9
# Turns of the two loops whose difference is timed.
_TURNS, _LONG_TURNS = (16, 80), (1, 5)


@dataclass(frozen=True)
class Routing:
    """What some steps asked of the experts.

    touched: distinct experts of this rank, mean over MoE layers and steps.
    different_tokens: of a tree, mean over steps. Rows of one token choose nearly alike. A random
      draft is sure of nothing, so all nodes are children of the root, each of another token.
    """

    touched: float
    different_tokens: float


class Between(NamedTuple):
    """What the stages of one step give to each other."""

    log_probs: DraftLogProbs | None
    tree: Tree
    tree_logits: TreeLogits
    topk_ids: tuple[jax.Array, ...]
    accepted: Accepted


class Stages:
    """The stages of one plan, each the function that the step calls, compiled as the step is.

    `verify` gives the chosen experts of every MoE layer besides: they are among its values anyway.
    """

    def __init__(self, loaded: Loaded):
        assert isinstance(loaded.placement, OneRank)
        self._loaded, self._placement = loaded, loaded.placement
        plan = loaded.plan
        self.draft = self._program(lambda params, state: draft(self._models(params), state, plan))
        self.tree_build = self._program(lambda table, anchor: tree_build(table, anchor, plan))
        self.verify = self._program(self._verify)
        self.accept = self._program(lambda tree, x, state: accept(tree, x, state, plan))
        self.compact = self._program(self._compact, donate=3)

    def step(self, state: SpecState) -> Between:
        """Returns what one step computes before it commits anything."""
        params = self._loaded.params
        log_probs = self.draft(params, state)
        tree = self.tree_build(log_probs, state.anchor)
        tree_logits, topk_ids = self.verify(params, tree, state)
        accepted = self.accept(tree, tree_logits.logits, state)
        return Between(log_probs, tree, tree_logits, topk_ids, accepted)

    def routing(self, state: SpecState, n_steps: int) -> Routing:
        """Returns what the next steps ask of the experts; they are really run.

        Donates: state.
        """
        counts, different = [], []
        for _ in range(n_steps):
            found = self.step(state)
            rows = found.tree_logits.rows
            state = self.compact(self._loaded.params, rows, found.accepted, state)
            counts += [_touched(np.asarray(ids), self._n_held) for ids in found.topk_ids]
            tokens = np.asarray(found.tree.token_ids)[np.asarray(found.tree.valid)]
            different.append(len(np.unique(tokens)))
        return Routing(float(np.mean(counts or [0])), float(np.mean(different)))

    def seconds(self, state: SpecState) -> Iterator[tuple[str, float]]:
        """Yields each stage and the seconds it takes in one step, as they are measured.

        All run in loops on the device, whose dispatch is taken off, and of the short ones the
        links: started from the host, a program pays for each new place of its results.
        """
        params = self._loaded.params
        found = self.step(state)
        if found.log_probs is not None:
            yield "draft", self._repeated(self._draft_again, state.anchor, (params, state))
            operands = found.log_probs.token_ids, state.anchor
            yield "tree_build", self._looped(self._build_again, found.log_probs.log_probs, operands)
        operands = params, found.tree, state
        yield "verify", self._repeated(self._verify_again, found.tree.token_ids, operands)
        logits = found.tree_logits.logits
        yield "accept", self._looped(self._accept_again, logits, (found.tree, state))
        rows = found.tree_logits.rows
        operands = params, rows, found.accepted, state
        held = rows.c_kv, rows.features, state.cache, state.draft_cache
        yield "compact", self._looped(self._compact_again, held, operands)

    def heap_seconds(self, state: SpecState) -> float:
        """Returns the seconds in which the published heap builder makes the step's tree."""
        table = self.draft(self._loaded.params, state).log_probs
        return heap_seconds(np.asarray(table), self._loaded.plan.budget)

    @property
    def _n_held(self) -> int:
        mesh = self._placement.mesh
        return self._loaded.models.target.config.n_routed_experts // mesh.shape["expert"]

    def _program(self, function: Callable[..., Any], donate: int | None = None) -> Any:
        return jax.jit(
            self._placement.program(function),
            donate_argnums=donate,
            compiler_options=compile_options(),
        )

    def _looped(self, again: Callable[..., Any], held: Any, operands: Any) -> float:
        """Returns the seconds of a stage by two loops of different length, less their links.

        Args:
          again: (held, operands, really) -> held, made to depend on what the stage gives; not
            really: the link alone.
        """

        def loop(n_turns: int, really: bool) -> Callable[..., Any]:
            def program(held: Any, operands: Any) -> Any:
                held = lax.fori_loop(0, n_turns, lambda _, x: again(x, operands, really), held)
                # One number of each: whole caches of every call in the queue would fill the card.
                return [x[(0,) * x.ndim] for x in jax.tree.leaves(held) if x.size]

            return self._program(program)

        def slope(really: bool) -> float:
            short, long = (
                _seconds_in_a_row(functools.partial(loop(n, really), held, operands))
                for n in _TURNS
            )
            return (long - short) / (_TURNS[1] - _TURNS[0])

        return slope(True) - slope(False)

    def _repeated(self, again: Callable[..., Any], held: Any, operands: Any) -> float:
        """Returns the seconds of a long stage, by one program of two lengths; one compilation.

        Args:
          again: (held, operands) -> held, made to depend on what the stage gives.
        """

        def program(n_turns: Any, held: Any, operands: Any) -> jax.Array:
            held = lax.fori_loop(0, n_turns, lambda _, x: again(x, operands), held)
            return held[(0,) * held.ndim]

        loop = self._program(program)
        short, long = (
            _seconds_in_a_row(lambda n=n: loop(np.int32(n), held, operands)) for n in _LONG_TURNS
        )
        return (long - short) / (_LONG_TURNS[1] - _LONG_TURNS[0])

    def _draft_again(self, x: jax.Array, operands: Any) -> jax.Array:
        params, state = operands
        found = draft(self._models(params), replace(state, anchor=x), self._loaded.plan)
        return touched(x, jax.tree.leaves(found))

    def _verify_again(self, x: jax.Array, operands: Any) -> jax.Array:
        params, tree, state = operands
        found, _ = self._verify(params, replace(tree, token_ids=x), state)
        return touched(x, jax.tree.leaves(found))

    def _build_again(self, x: jax.Array, operands: Any, really: bool) -> jax.Array:
        token_ids, anchor = operands
        if not really:
            return touched(x, [anchor])
        tree = tree_build(DraftLogProbs(x, token_ids), anchor, self._loaded.plan)
        return touched(x, jax.tree.leaves(tree))

    def _accept_again(self, x: jax.Array, operands: Any, really: bool) -> jax.Array:
        tree, state = operands
        if not really:
            return touched(x, [state.anchor])
        return touched(x, jax.tree.leaves(accept(tree, x, state, self._loaded.plan)))

    def _compact_again(self, held: Any, operands: Any, really: bool) -> Any:
        """Commits the same rows to the same place once more."""
        params, rows, accepted, state = operands
        c_kv, features, cache, draft_cache = held
        c_kv = touched(c_kv, [cache.c_kv])
        if draft_cache is not None and features.shape[-1]:
            features = touched(features, [draft_cache.keys])
        if really:
            rows = replace(rows, c_kv=c_kv, features=features)
            state = replace(state, cache=cache, draft_cache=draft_cache)
            new = self._compact(params, rows, accepted, state)
            cache, draft_cache = new.cache, new.draft_cache
        return c_kv, features, cache, draft_cache

    def _models(self, params: Params) -> Models:
        models = self._loaded.models
        drafter = bind(models.drafter, params["drafter"]) if models.drafter else None
        return Models(bind(models.target, params["target"]), drafter)

    def _verify(self, params: Params, tree: Tree, state: SpecState) -> Any:
        models = self._models(params)
        topk_ids = _recorded(models.target)
        return verify(models, tree, state, self._loaded.plan), tuple(topk_ids)

    def _compact(
        self, params: Params, rows: Rows, accepted: Accepted, state: SpecState
    ) -> SpecState:
        return compact(self._models(params), state, rows, accepted, self._loaded.plan.kernels)


def _recorded(target: Target) -> list[jax.Array]:
    """Returns a list that each MoE layer of a trace of the target puts its choices in."""
    found: list[jax.Array] = []
    if not target.config.moe_layer_ids:
        return found
    choose = target.moe.choose

    def recording(*operands: Any) -> Any:
        chosen = choose(*operands)
        found.append(chosen[0])
        return chosen

    setattr(target.moe, "choose", recording)  # noqa: B010
    return found


def _touched(ids: np.ndarray, n_held: int) -> int:
    return len(np.unique(ids[ids < n_held]))


def _seconds_in_a_row(call: Callable[[], Any]) -> float:
    """Returns the median seconds of a call among some whose programs wait in the queue."""
    times = []
    for turn in range(_REPEATS + 2):
        begun = time.perf_counter()
        jax.block_until_ready([call() for _ in range(_IN_A_ROW)])
        if turn >= 2:
            times.append((time.perf_counter() - begun) / _IN_A_ROW)
    return statistics.median(times)
