"""The compiled programs and the state of the slots, which they read and write on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.stages import Compiled

from k26jax.config import MAX_STOP_IDS
from k26jax.engine.loading import Loaded
from k26jax.engine.page_tree import PageTree
from k26jax.engine.placement import places_of
from k26jax.engine.prefix_cache import PROGRAMS, PrefixCache
from k26jax.engine.request import Request, SamplingParams
from k26jax.engine.step_costs import CostTable
from k26jax.errors import RequestError
from k26jax.model.parameters import Params, bind
from k26jax.pallas.gpu import architecture
from k26jax.spec.auto_width import AutoWidth
from k26jax.spec.prefill import Chunk, prefill
from k26jax.spec.state import Models, Sampling, SpecState, seed_words
from k26jax.spec.step import Steps, run_steps

SHUT_DOWN = "this LLM was shut down; make a new one"
_SMALL_CHUNK = 32


# Left to itself XLA skips a rounding between operations it fuses, so a prefill that also gives the
# drafter its features would leave other bits in the cache than one that does not.
_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
# On a GPU XLA picks its products by timing them, so two starts could pick two orders of a sum.
_GPU_OPTIONS: dict[str, Any] = {
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": False,
}


class Runner:
    """Owns the state of all slots and the programs that advance it.

    Programs are compiled ahead of time, each for one shape; calling them never compiles.
    """

    def __init__(self, loaded: Loaded):
        self._loaded = loaded
        self._compiled: dict[str, Callable[..., Any]] = {}
        config = loaded.config
        largest = loaded.page_tokens
        self.chunk_sizes = sorted({min(_SMALL_CHUNK, largest), largest})
        self.slots = config.max_running_requests
        self._shapes = loaded.state_shapes()
        self._make_state = self._state_maker()
        self._costs = loaded.costs
        self._state: SpecState | None = None
        self._prompts: dict[int, Iterator[Chunk]] = {}
        self._prefixes = PrefixCache(loaded, self._program) if loaded.prefix_pages else None
        self._cached: dict[int, int] = {}
        self._is_closed = False

    @property
    def programs(self) -> list[str]:
        """Names of the programs that plain generation needs."""
        names = [f"prefill_{size}" for size in self.chunk_sizes] + ["steps", "release"]
        names += [] if self._prefixes is None else PROGRAMS
        return names if self._costs is None else [*names, "costs"]

    def warm_up(self, progress: Callable[[str], None] | None = None) -> None:
        """Compiles all programs that generation needs, and then makes the slots' state.

        Args:
          progress: called with each program's name before it is compiled.

        Raises: CapacityError if state and programs do not fit in memory together.
        """
        for name in self.programs:
            if progress:
                progress(name)
            self._program(name)
        self.restore()

    def warm_up_traces(self) -> None:
        """Compiles the program that also records trees."""
        self._program("traced_steps")

    def prefill(self, slot: int, request: Request) -> int:
        """Returns the first token of a request, whose prompt is now in `slot`."""
        self.begin(slot, request)
        while (first_token := self.prefill_next(slot)) is None:
            pass
        return first_token

    def begin(self, slot: int, request: Request) -> None:
        """Notes the prompt that `prefill_next` puts into a slot; until its end the slot is idle."""
        self._prompts[slot] = self._chunks_not_kept(slot, request)

    def prefill_next(self, slot: int) -> int | None:
        """Puts the next chunk of a slot's prompt there; returns the first token after the last.

        Steps of other slots may run in between: an idle slot's rows stay as they are.
        """
        chunk = next(self._prompts[slot])
        size = chunk.token_ids.shape[0]
        self._state, out = self._program(f"prefill_{size}")(self._loaded.params, chunk, self._state)
        if self._prefixes is not None:
            self._prefixes.keep(self.state, slot, chunk)
        if not chunk.is_last:
            return None
        del self._prompts[slot]
        if self._prefixes is not None:
            self._prefixes.release(slot)
        return int(np.asarray(out.first_token))

    def cached_tokens(self, slot: int) -> int:
        """Returns how many tokens of a slot's prompt came from the prefix cache."""
        return self._cached.get(slot, 0)

    @property
    def pages(self) -> PageTree | None:
        """What the prefix cache holds; None without one."""
        return self._prefixes and self._prefixes.tree

    def flush(self) -> int:
        """Returns how many tokens the prefix cache held; it is empty now. No slot may be busy."""
        pages = self.pages
        return 0 if pages is None else pages.clear() * pages.page_tokens

    def run(self, limit: int, *, record_trees: bool = False) -> Steps:
        """Returns what up to `limit` steps emitted, on the host; one dispatch."""
        program = self._program("traced_steps" if record_trees else "steps")
        self._state, steps = program(self._loaded.params, self._state, np.int32(limit))
        return jax.device_get(steps)

    def release(self, slot: int) -> None:
        """Makes a slot idle; after `close` there is none."""
        self._prompts.pop(slot, None)
        self._cached.pop(slot, None)
        if self._prefixes is not None:
            self._prefixes.release(slot)
        if not self._is_closed:
            self.restore()
            self._state = self._program("release")(self._state, np.int32(slot))

    def restore(self) -> None:
        """Makes a state of idle slots if there is none, or an interrupted program has lost it.

        Ctrl-C during a dispatch does that: the program had the state and gave no new one.
        """
        if self._is_closed:
            raise RequestError(SHUT_DOWN)
        is_lost = self._state is None or any(x.is_deleted() for x in jax.tree.leaves(self._state))
        if is_lost or (self._prefixes is not None and self._prefixes.is_lost):
            self.reset()

    def reset(self) -> None:
        """Makes a state of idle slots in place of the one there is; no prefix is kept."""
        self._prompts.clear()
        self._cached.clear()
        if self._prefixes is not None:
            self._prefixes.reset()
        self._state = self._make_state()
        if self._costs is not None:
            self.set_costs(self._costs)

    @property
    def costs(self) -> CostTable | None:
        """What steps cost, by which they choose their rows; None where all have as many."""
        return self._costs

    def set_costs(self, costs: CostTable) -> None:
        """Makes steps choose by these costs, and forget what drafts were worth."""
        self._costs = costs
        self._state = self._program("costs")(self.state, *self._small_arguments("costs"))

    @property
    def state(self) -> SpecState:
        """The slots' state, on the device; the next call donates it."""
        if self._state is None:
            raise RequestError(SHUT_DOWN)
        return self._state

    def occupy(self, slot: int, *, length: int, max_tokens: int) -> None:
        """Makes a slot busy after `length` tokens that nobody computed, for measurements."""
        numbers = (slot, length, max_tokens)
        self._state = self._program("occupy")(self.state, *map(np.int32, numbers))

    def put(self, slot: int, token_ids: Sequence[int], *, start: int) -> None:
        """Puts one chunk into a slot behind `start` tokens, for measurements."""
        chunk = self._chunk(slot, token_ids, start, len(token_ids), None)
        program = self._program(f"prefill_{len(token_ids)}")
        self._state, _ = program(self._loaded.params, chunk, self.state)

    def program_text(self, name: str) -> str:
        """Returns the compiled program of a name, as text."""
        return self._program(name).as_text()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Returns the target's logits after each token, float32 [t, w]; uses slot 0.

        Cost: one prefill; memory for the logits of one chunk on the device.
        """
        rows = []
        for chunk in self._chunks(0, token_ids, None):
            size, count = chunk.token_ids.shape[0], int(chunk.count)
            self._state, out = self._program(f"logits_{size}")(
                self._loaded.params, chunk, self._state
            )
            rows.append(np.asarray(out.logits[:count]))
        return np.concatenate(rows)

    def close(self) -> None:
        """Frees the state and the programs."""
        self._compiled.clear()
        self._state = None
        if self._prefixes is not None:
            self._prefixes.close()
        self._is_closed = True

    def _program(self, name: str) -> Callable[..., Any]:
        if self._is_closed:
            raise RequestError(SHUT_DOWN)
        if name not in self._compiled:
            program = self._compile(name)
            self._require_memory(program)
            self._compiled[name] = program
        return self._compiled[name]

    def _require_memory(self, program: Compiled) -> None:
        """Raises CapacityError unless a program's scratch space fits beside the slots' state."""
        sizes = program.memory_analysis()
        scratch = sizes.temp_size_in_bytes if sizes else 0
        self._loaded.require_memory(has_cache=self._state is not None, program=scratch)

    def _compile(self, name: str) -> Compiled:
        if name in PROGRAMS:
            assert self._prefixes is not None
            return self._prefixes.compile(name)
        kind, _, size = name.partition("_")
        params, state = self._loaded.params, self._shapes
        if kind in ("prefill", "logits"):
            chunk = self._chunk(0, (), 0, int(size), None)
            program = self._placed(self._prefill_program(kind == "logits"), 2)
            program = jax.jit(program, donate_argnums=2)
            return program.lower(params, chunk, state).compile(compile_options())
        if name in _SMALL:
            places = None if self._loaded.placement is None else places_of(state)
            program = jax.jit(_SMALL[name], donate_argnums=0, out_shardings=places)
            return program.lower(state, *self._small_arguments(name)).compile()
        program = self._placed(self._steps_program(kind == "traced"), 1)
        program = jax.jit(program, donate_argnums=1)
        return program.lower(params, state, np.int32(1)).compile(compile_options())

    def _small_arguments(self, name: str) -> list[Any]:
        if name == "costs":
            assert self._costs is not None
            return list(self._costs.arrays)
        return [np.int32(0)] * (3 if name == "occupy" else 1)

    def _state_maker(self) -> Callable[[], SpecState]:
        loaded = self._loaded
        if loaded.placement is None:
            return loaded.empty_state
        return loaded.placement.state_maker(loaded.empty_state)

    def _placed(self, program: Callable[..., Any], state_at: int) -> Callable[..., Any]:
        """Returns the program for all ranks of the mesh; itself on one device."""
        placement = self._loaded.placement
        return program if placement is None else placement.program(program, state_at=state_at)

    def _models(self, params: Params) -> Models:
        models = self._loaded.models
        drafter = bind(models.drafter, params["drafter"]) if models.drafter else None
        return Models(bind(models.target, params["target"]), drafter)

    def _prefill_program(self, all_logits: bool) -> Callable[..., Any]:
        def program(params: Params, chunk: Chunk, state: SpecState):
            # Interpreted, a kernel takes many times as long, and here one of many rows.
            kernels = self._loaded.plan.kernels if architecture() else "reference"
            models = self._models(params)
            return prefill(models, chunk, state, all_logits=all_logits, kernels=kernels)

        return program

    def _steps_program(self, record_trees: bool) -> Callable[..., Any]:
        def program(params: Params, state: SpecState, limit: jax.Array):
            n_steps = self._loaded.config.steps_per_dispatch
            return run_steps(
                self._models(params),
                state,
                self._loaded.plan,
                n_steps,
                limit=limit,
                record_trees=record_trees,
            )

        return program

    def _chunks_not_kept(self, slot: int, request: Request) -> Iterator[Chunk]:
        """Yields the chunks behind what the prefix cache holds, which is then in the slot.

        It is looked up with the first chunk: prompts that end in the meantime are kept by then.
        """
        start, token_ids = 0, request.prompt_token_ids
        if self._prefixes is not None:
            self._state, start = self._prefixes.take(self.state, slot, token_ids)
        self._cached[slot] = start
        yield from self._chunks(slot, token_ids, request, start)

    def _chunks(
        self, slot: int, token_ids: Sequence[int], request: Request | None, start: int = 0
    ) -> Iterator[Chunk]:
        """Yields the prompt's chunks: large ones, and a small one for a short rest."""
        small, large = self.chunk_sizes[0], self.chunk_sizes[-1]
        while start < len(token_ids):
            rest = len(token_ids) - start
            size = small if rest <= small else large
            yield self._chunk(slot, token_ids[start : start + size], start, size, request, rest)
            start += size

    def _chunk(
        self,
        slot: int,
        token_ids: Sequence[int],
        start: int,
        size: int,
        request: Request | None,
        rest: int = 0,
    ) -> Chunk:
        padded = np.zeros(size, np.int32)
        padded[: len(token_ids)] = token_ids
        return Chunk(
            token_ids=_host(padded, np.int32),
            count=_host(len(token_ids), np.int32),
            start=_host(start, np.int32),
            slot=_host(slot, np.int32),
            is_last=_host(request is not None and rest <= size, np.bool_),
            max_tokens=_host(request.max_tokens if request else 0, np.int32),
            sampling=_sampling_row(request),
        )


def compile_options() -> dict[str, Any]:
    """Returns what XLA is told for every program that computes rows of the models."""
    return _OPTIONS | (_GPU_OPTIONS if jax.default_backend() == "gpu" else {})


def _release(state: SpecState, slot: jax.Array) -> SpecState:
    return dataclasses.replace(state, remaining=state.remaining.at[slot].set(0))


def _occupy(
    state: SpecState, slot: jax.Array, length: jax.Array, max_tokens: jax.Array
) -> SpecState:
    return dataclasses.replace(
        state,
        length=state.length.at[slot].set(length),
        remaining=state.remaining.at[slot].set(max_tokens),
    )


def _set_costs(state: SpecState, contexts: jax.Array, milliseconds: jax.Array) -> SpecState:
    return dataclasses.replace(state, auto=AutoWidth.of(contexts, milliseconds))


# Programs that change the slots' numbers and nothing else; the state stays in its place.
_SMALL: dict[str, Callable[..., SpecState]] = {
    "release": _release,
    "occupy": _occupy,
    "costs": _set_costs,
}


def _host(value: Any, dtype: Any) -> Any:
    """Returns a host array; a compiled program takes it where its records name device arrays."""
    return np.asarray(value, dtype)


def _sampling_row(request: Request | None) -> Sampling:
    stop_ids = np.full((1, MAX_STOP_IDS), -1, np.int32)
    params = request.params if request else SamplingParams(temperature=0)
    if request:
        stop_ids[0, : len(request.stop_ids)] = request.stop_ids
    return Sampling(
        temperature=_host([params.temperature], np.float32),
        top_k=_host([max(params.top_k, 0)], np.int32),
        top_p=_host([params.top_p], np.float32),
        min_p=_host([params.min_p], np.float32),
        seed=_host(seed_words(request.seed if request else 0)[None], np.uint32),
        stop_ids=_host(stop_ids, np.int32),
    )
