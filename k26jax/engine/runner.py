"""The compiled programs and the state of the slots, which they read and write on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.stages import Compiled

from k26jax.engine.compile_options import compile_options
from k26jax.engine.guiding import GUIDED, Guiding, guided_program
from k26jax.engine.loading import Loaded
from k26jax.engine.page_tree import PageTree
from k26jax.engine.placement import places_of
from k26jax.engine.prefix_cache import PROGRAMS, PrefixCache
from k26jax.engine.request import Request
from k26jax.engine.rows import adjustments_row, host_array, sampling_row
from k26jax.engine.small_programs import SMALL
from k26jax.engine.step_costs import CostTable
from k26jax.errors import RequestError
from k26jax.model.parameters import Params, bind
from k26jax.pallas.gpu import architecture
from k26jax.spec.log_probs import LogProbs
from k26jax.spec.prefill import Chunk, prefill
from k26jax.spec.state import Models, SpecState
from k26jax.spec.step import Steps, run_steps

SHUT_DOWN = "this LLM was shut down; make a new one"
_SMALL_CHUNK = 32


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
        self._with_extras: set[int] = set()  # slots whose requests ask for more than tokens
        self._first_log_probs: dict[int, LogProbs] = {}
        self._prefixes = PrefixCache(loaded, self._program) if loaded.prefix_pages else None
        self._cached: dict[int, int] = {}
        self._is_closed = False
        self._guiding = Guiding(loaded.grammars, loaded.models.target.config.vocab_size)

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
        self._compile_all(self.programs, progress)
        self.restore()

    def warm_up_traces(self, *, has_extras: bool = False) -> None:
        """Compiles the program that also records trees, with or without extras."""
        self._program("traced_extra_steps" if has_extras else "traced_steps")

    def warm_up_extras(self, progress: Callable[[str], None] | None = None) -> None:
        """Compiles the programs for requests that change logits or want log-probabilities.

        Without this they are compiled when the first such request comes.
        """
        self._compile_all(("extra_steps", "adjust"), progress)

    def warm_up_guided(self, progress: Callable[[str], None] | None = None) -> None:
        """Compiles the two programs of a step in which a request follows a grammar."""
        self._compile_all(GUIDED, progress)

    def prefill(self, slot: int, request: Request) -> int:
        """Returns the first token of a request, whose prompt is now in `slot`."""
        self.begin(slot, request)
        while (first_token := self.prefill_next(slot)) is None:
            pass
        return first_token

    def begin(self, slot: int, request: Request) -> None:
        """Notes the prompt that `prefill_next` puts into a slot; until its end the slot is idle."""
        if request.params.structured_outputs is not None:
            self.warm_up_guided()
        self._guiding.begin(slot, request)
        self._prompts[slot] = self._chunks_not_kept(slot, request)
        if request.has_extras:
            self._with_extras.add(slot)
        if request.adjusts:
            row = adjustments_row(request, self._loaded.models.target.config.vocab_size)
            self._state = self._program("adjust")(self._state, np.int32(slot), row)

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
        if slot in self._with_extras:
            self._first_log_probs[slot] = jax.device_get(out.log_probs)
        if self._prefixes is not None:
            self._prefixes.release(slot)
        first_token = int(np.asarray(out.first_token))
        self._guiding.advance(slot, [first_token])
        return first_token

    def first_log_probs(self, slot: int) -> LogProbs:
        """Returns the log-probabilities of the first token of a slot whose request asks for them.

        They are there from the end of its prefill to its release.
        """
        return self._first_log_probs[slot]

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
        """Returns what up to `limit` steps emitted, on the host; one dispatch.

        Where a slot follows a grammar it is one step, in two: the host makes the masks in between.
        """
        if self._guiding.is_needed:
            self._state, steps = self._guiding.step(
                self._program, self._loaded.params, self.state, record_trees=record_trees
            )
            return steps
        kind = ("traced_" if record_trees else "") + ("extra_" if self._with_extras else "")
        program = self._program(f"{kind}steps")
        self._state, steps = program(self._loaded.params, self._state, np.int32(limit))
        return jax.device_get(steps)

    def release(self, slot: int) -> None:
        """Makes a slot idle; after `close` there is none."""
        self._prompts.pop(slot, None)
        self._guiding.end(slot)
        self._with_extras.discard(slot)
        self._first_log_probs.pop(slot, None)
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
        self._guiding.clear()
        self._with_extras.clear()
        self._first_log_probs.clear()
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

    def _compile_all(self, names: Sequence[str], progress: Callable[[str], None] | None) -> None:
        for name in names:
            if progress:
                progress(name)
            self._program(name)

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
        if name in SMALL:
            places = None if self._loaded.placement is None else places_of(state)
            program = jax.jit(SMALL[name], donate_argnums=0, out_shardings=places)
            return program.lower(state, *self._small_arguments(name)).compile()
        if name in GUIDED:
            program, between = guided_program(name, self._loaded, self._models)
            program = jax.jit(self._placed(program, 2), donate_argnums=2)
            return program.lower(params, between, state).compile(compile_options())
        words = name.split("_")
        program = self._placed(self._steps_program("traced" in words, "extra" in words), 1)
        program = jax.jit(program, donate_argnums=1)
        return program.lower(params, state, np.int32(1)).compile(compile_options())

    def _small_arguments(self, name: str) -> list[Any]:
        if name == "costs":
            assert self._costs is not None
            return list(self._costs.arrays)
        if name == "adjust":
            row = jax.eval_shape(self._shapes.adjustments.of, np.int32(0))
            return [np.int32(0), row]
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

    def _steps_program(self, record_trees: bool, has_extras: bool) -> Callable[..., Any]:
        plan = self._loaded.plan.with_extras() if has_extras else self._loaded.plan

        def program(params: Params, state: SpecState, limit: jax.Array):
            n_steps = self._loaded.config.steps_per_dispatch
            return run_steps(
                self._models(params),
                state,
                plan,
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
            token_ids=host_array(padded, np.int32),
            count=host_array(len(token_ids), np.int32),
            start=host_array(start, np.int32),
            slot=host_array(slot, np.int32),
            is_last=host_array(request is not None and rest <= size, np.bool_),
            max_tokens=host_array(request.max_tokens if request else 0, np.int32),
            sampling=sampling_row(request),
            allowed=host_array(self._guiding.first_mask(slot), np.uint32),
        )
