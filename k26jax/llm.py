"""The Python API: load a model, generate, stream, look at logits."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import os
from collections.abc import Callable, Generator, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from k26jax.config import EngineConfig
from k26jax.engine.engine import Engine
from k26jax.engine.loading import Prepared, Progress, load, prepare, without_drafter
from k26jax.engine.output import CompletionOutput, RequestOutput, StreamChunk
from k26jax.engine.request import (
    Request,
    SamplingParams,
    checked_params,
    is_listing,
    refuse_unknown,
    token_ids_of,
)
from k26jax.engine.runner import SHUT_DOWN
from k26jax.engine.step_costs import settle_costs
from k26jax.errors import K26Error, RequestError
from k26jax.llm_chat import Chatting

Prompt = str | Sequence[int]
_OPTIONS = [item for item in dataclasses.fields(EngineConfig) if item.name != "model_path"]


def _signature() -> inspect.Signature:
    """The constructor's signature with every option spelled out, for help() and editors."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(item.name, keyword, default=item.default, annotation=item.type)
        for item in _OPTIONS
    ]
    model_path = inspect.Parameter("model_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    hooks = [inspect.Parameter(name, keyword, default=None) for name in ("on_load", "on_compile")]
    return inspect.Signature([model_path, *options, *hooks])


class LLM(Chatting):
    """A loaded model that turns prompts into text.

    Args:
      model_path: model folder in the Hugging Face layout.
      options: any other field of `k26jax.config.EngineConfig`, by name; among them
        speculative_draft_model_path, speculative_algorithm, speculative_ddtree_budget,
        speculative_dflash_block_size, tp_size, ep_size, dtype, kernels, context_length,
        max_running_requests, enable_prefix_caching, seed.
      on_load: called with (what, bytes done, bytes in all) while weights are read.
      on_compile: called with the name of each program before it is compiled.

    Raises: TypeError for an unknown option, naming the nearest; a K26Error for bad folders, values
      or sizes.
    """

    __signature__ = _signature()

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        on_load: Progress | None = None,
        on_compile: Callable[[str], None] | None = None,
        **options: Any,
    ):
        refuse_unknown("LLM", list(options), [item.name for item in _OPTIONS])
        options["model_path"] = model_path
        self._start(prepare(EngineConfig(**options)), on_load, on_compile)

    @classmethod
    def from_prepared(
        cls,
        prepared: Prepared,
        *,
        on_load: Progress | None = None,
        on_compile: Callable[[str], None] | None = None,
    ) -> LLM:
        """Returns the LLM of what `k26jax.engine.loading.prepare` gave.

        A caller who has the request already checks it in between, before the weights are read.
        """
        llm = cls.__new__(cls)
        llm._start(prepared, on_load, on_compile)
        return llm

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Returns the LLM of an engine whose programs are compiled, or will be as they are used."""
        llm = cls.__new__(cls)
        llm._use(engine)
        return llm

    def _start(
        self,
        prepared: Prepared,
        on_load: Progress | None,
        on_compile: Callable[[str], None] | None,
    ) -> None:
        self._use(Engine(load(prepared, on_load)))
        runner, loaded = self.engine.runner, self.engine.loaded
        runner.warm_up(on_compile)
        if loaded.costs is not None and loaded.leads:
            settle_costs(runner, loaded)

    def _use(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self.config = engine.loaded.config
        self._requests_made = 0

    @property
    def engine(self) -> Engine:
        """The engine behind this object.

        Raises: RequestError after `shutdown`.
        """
        if self._engine is None:
            raise RequestError(SHUT_DOWN)
        return self._engine

    @property
    def leads(self) -> bool:
        """Whether this process takes requests; in a run of several processes only process 0 does.

        The others build the same LLM and call `follow`.
        """
        return self.engine.loaded.leads

    def follow(self) -> None:
        """Works for process 0 until it shuts its LLM down; returns at once in a run of one.

        Raises: ClusterError if a process of the run dies or hangs.
        """
        self.engine.follow()

    @property
    def step_costs(self) -> dict[str, Any] | None:
        """Milliseconds of a step by width and context, as `speculative_cost_table` reads them.

        None where the budget is fixed.
        """
        costs = self.engine.runner.costs
        return None if costs is None else costs.record()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Returns one output per prompt, in order; a prompt that fails carries its `error`.

        Args:
          prompts: a string, a list of strings, a list of token ids, or a list of those.
          sampling_params: one for all prompts, or one each; default: SamplingParams().
          use_tqdm: show a progress bar with tokens per second.
          raise_on_error: raise the first prompt's error instead.

        Raises: RequestError if another run of this LLM is in progress.
        """
        engine = self.engine
        engine.refuse_if_busy()
        items = _as_list(prompts)
        jobs = [
            self._make_requests(prompt, params)
            for prompt, params in zip(items, _params_for(items, sampling_params), strict=True)
        ]
        if raise_on_error:
            for _, error in jobs:
                if error is not None:
                    raise error
        flat = [(job, request) for job, (found, _) in enumerate(jobs) for request in found]
        finished: dict[int, list[tuple[int, CompletionOutput]]] = {
            job: [] for job in range(len(jobs))
        }
        with (
            tqdm(total=len(flat), unit="seq", disable=not use_tqdm) as bar,
            contextlib.closing(engine.run([request for _, request in flat])) as run,
        ):
            for number, chunk in run:
                if chunk.output is not None:
                    finished[flat[number][0]].append((number, chunk.output))
                    bar.update()
        return [
            self._result(prompt, requests, error, finished[job])
            for job, (prompt, (requests, error)) in enumerate(zip(items, jobs, strict=True))
        ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, trace: bool = False
    ) -> Generator[StreamChunk, None, None]:
        """Yields a chunk after the prefill and after every decoding step; the last has `output`.

        A stream has the LLM for itself from its first chunk to its end, or to its `close`; until
        then everything else that runs the model is refused.

        Args:
          trace: give each chunk the step's draft tree and accepted path.

        Raises: RequestError at the call, not at the first chunk; except that of two streams which
          were both made before either was read, the other one refuses to be read in between.
        """
        engine = self.engine
        engine.refuse_if_busy()
        requests, error = self._make_requests(prompt, checked_params(sampling_params))
        if error is not None:
            raise error
        if len(requests) != 1:
            raise RequestError("stream gives one sequence; set n = 1")
        if trace and requests[0].params.structured_outputs is None:
            engine.runner.warm_up_traces(has_extras=requests[0].has_extras)
        return _chunks(engine.run(requests, steps_per_dispatch=1, trace=trace))

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Returns the target's logits after each token, float32 [len(token_ids), vocabulary].

        Raises: RequestError for ids outside the vocabulary, none, or more than the context holds,
          and if a run of this LLM is in progress.
        """
        loaded, ids = self.engine.loaded, token_ids_of(token_ids, "token_ids")
        context = loaded.context_length
        if len(ids) > context:
            raise RequestError(
                f"token_ids holds {len(ids)} tokens and the context {context}; give fewer or raise "
                "context_length"
            )
        # Nothing is generated, so the context's last position holds a token too.
        roomy = dataclasses.replace(loaded, context_length=context + 1)
        request = roomy.request(ids, SamplingParams())
        return self.engine.logits(request.prompt_token_ids)

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Returns the checked request of one sequence, for `engine.run`.

        Raises: RequestError if the prompt cannot be run, or n is not 1.
        """
        if checked_params(params).n != 1:
            raise RequestError(f"n = {params.n}, expected 1: a request is one sequence")
        return self.requests(prompt, params)[0]

    def requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Returns the checked requests of a prompt, one for each of its `n` sequences.

        Raises: RequestError or TokenizerError if the prompt cannot be run.
        """
        requests, error = self._make_requests(prompt, checked_params(params))
        if error is not None:
            raise error
        return requests

    def without_drafter(self, on_compile: Callable[[str], None] | None = None) -> LLM:
        """Returns an LLM that decodes plainly with the weights of this one.

        Raises: RequestError in a run of several processes, CapacityError without room.
        Cost: a second cache; its programs are compiled.
        """
        if self.engine.loaded.cluster is not None:
            raise RequestError(
                "the weights of a run of several processes serve one engine; load the model "
                "without a drafter instead"
            )
        plain = copy.copy(self)
        plain._use(Engine(without_drafter(self.engine.loaded)))
        plain.engine.runner.warm_up(on_compile)
        return plain

    def shutdown(self) -> None:
        """Frees the model; calling it again does nothing."""
        if self._engine is not None:
            self._engine.runner.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _make_requests(
        self, prompt: Prompt, params: SamplingParams
    ) -> tuple[list[Request], K26Error | None]:
        loaded = self.engine.loaded
        try:
            ids = loaded.encode(prompt)
            requests = []
            for index in range(params.n):
                seed = self.config.seed + self._requests_made
                self._requests_made += 1
                chosen = params
                if params.seed is not None and params.n > 1:
                    chosen = dataclasses.replace(params, seed=params.seed + index)
                requests.append(loaded.request(ids, chosen, seed=seed))
            return requests, None
        except K26Error as error:
            return [], error

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns a prompt's token ids; special strings in text are plain text.

        Raises: TokenizerError for text without a tokenizer, RequestError for another type.
        """
        return self.engine.loaded.encode(prompt)

    def _result(
        self,
        prompt: Prompt,
        requests: list[Request],
        error: K26Error | None,
        finished: list[tuple[int, CompletionOutput]],
    ) -> RequestOutput:
        outputs = [
            dataclasses.replace(output, index=index)
            for index, (_, output) in enumerate(sorted(finished, key=lambda item: item[0]))
        ]
        text = prompt if isinstance(prompt, str) else None
        ids = list(requests[0].prompt_token_ids) if requests else []
        return RequestOutput(text, ids, outputs, error=str(error) if error else None)


def _chunks(
    run: Generator[tuple[int, StreamChunk], None, None],
) -> Generator[StreamChunk, None, None]:
    with contextlib.closing(run):
        for _, chunk in run:
            yield chunk


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    expected = "expected text, a list of token ids, or a list of those"
    if not is_listing(prompts):
        raise RequestError(f"prompts is {prompts!r:.80}, {expected}")
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    for item in items:
        if not isinstance(item, str) and not is_listing(item):
            raise RequestError(f"prompts hold {item!r:.80}, {expected}")
    return items


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if not is_listing(params):
        return [checked_params(params)] * len(prompts)
    items = [checked_params(item) for item in params]
    if len(items) != len(prompts):
        raise RequestError(
            f"{len(items)} sampling_params for {len(prompts)} prompts; give one, or one each"
        )
    return items
