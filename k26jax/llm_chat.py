"""The part of the Python API that chats: messages in, messages out."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from k26jax.config import EngineConfig
from k26jax.engine.engine import Engine
from k26jax.engine.output import RequestOutput, StreamChunk, reading
from k26jax.engine.request import SamplingParams, checked_params, is_listing, refuse_unknown
from k26jax.errors import K26Error, RequestError
from k26jax.text.answer import ChatAnswer
from k26jax.text.call_grammar import chat_structure, parameters_structures
from k26jax.text.chat import ChatFormat, ChatPrompt, chat_format
from k26jax.text.events import Event
from k26jax.text.tools import check_tools, choose_tools

Messages = Sequence[Mapping[str, Any]]
_CHOICES = ("tool_choice", "parallel_tool_calls")
_OPTIONS = [*list(inspect.signature(ChatFormat.prompt).parameters)[2:], *_CHOICES]


class Chatting(abc.ABC):
    """Chat methods on top of `generate` and `stream`."""

    config: EngineConfig

    @property
    @abc.abstractmethod
    def engine(self) -> Engine:
        """The engine behind this object."""

    @abc.abstractmethod
    def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> Any:
        """Returns one output per prompt."""

    @abc.abstractmethod
    def stream(self, prompt: Any, sampling_params: Any = None) -> Any:
        """Yields a chunk a step."""

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = False,
        raise_on_error: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Returns one output per conversation, in order, as `generate` does.

        Each of its sequences has a `message`: thoughts, content, calls of tools, finish, usage.

        Args:
          messages: a list of objects with role and content, or a list of such lists.
          options: tools, thinking, preserve_thinking and options of `ChatFormat.prompt`, and
            tool_choice and parallel_tool_calls as `plan` takes them; the same for all
            conversations.
        """
        refuse_unknown("chat", list(options), _OPTIONS)
        params, chats = checked_params(sampling_params), _as_chats(messages)
        plans: list[tuple[ChatPrompt, SamplingParams] | K26Error] = []
        for item in chats:
            try:
                plans.append(self.plan(item, params, **options))
            except K26Error as error:
                if raise_on_error:
                    raise
                plans.append(error)
        good = [plan for plan in plans if not isinstance(plan, K26Error)]
        ran = self.generate(
            [prompt.token_ids for prompt, _ in good],
            [chosen for _, chosen in good],
            use_tqdm=use_tqdm,
            raise_on_error=raise_on_error,
        )
        results = iter([self._told(result, *plan) for result, plan in zip(ran, good, strict=True)])
        return [
            RequestOutput(None, [], [], error=str(plan))
            if isinstance(plan, K26Error)
            else next(results)
            for plan in plans
        ]

    def plan(
        self,
        messages: Messages,
        params: SamplingParams,
        *,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        tools: Any = None,
        **options: Any,
    ) -> tuple[ChatPrompt, SamplingParams]:
        """Returns the prompt of a conversation, and how its answer's tokens are chosen.

        Args:
          tool_choice: "auto", "none", "required" or an object that names a tool.
          parallel_tool_calls: False: one call at most.
          options: as `chat` takes them.

        Raises: RequestError for what the model's format has not, or a shape that cannot be had.
        """
        declared = choose_tools(check_tools(tools), tool_choice)
        prompt = self.chat_format.prompt(messages, declared, **options)
        return prompt, self.shaped(prompt, params, tool_choice, parallel_tool_calls)

    def shaped(
        self,
        prompt: ChatPrompt,
        params: SamplingParams,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
    ) -> SamplingParams:
        """Returns the parameters with the shape that a chat's answer must have, if it must.

        Raises: RequestError that names the field whose shape cannot be had.
        """
        loaded, asked = self.engine.loaded, params.structured_outputs
        if parallel_tool_calls not in (None, True, False):
            raise RequestError(f"parallel_tool_calls is {parallel_tool_calls!r:.80}, no boolean")
        if asked is not None:
            loaded.grammars.check(asked)
        assert loaded.tokenizer is not None, "a chat's prompt was made with the tokenizer"
        found = chat_structure(
            prompt,
            asked,
            loaded.tokenizer.special_ids,
            choice=tool_choice,
            parallel=parallel_tool_calls is not False,
        )
        if found is None:
            return params
        for where, structure in parameters_structures(prompt.tools, tool_choice).items():
            loaded.grammars.check(structure, where)
        return dataclasses.replace(params, structured_outputs=found)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Generator[list[Event], None, None]:
        """Yields the events of each decoding step of one answer; the last is its `Finish`.

        Args:
          options: as `chat` takes them.

        Raises: as `stream`, and RequestError for messages or options that make no prompt.
        """
        refuse_unknown("stream_chat", list(options), _OPTIONS)
        prompt, params = self.plan(messages, checked_params(sampling_params), **options)
        return _answers(self.stream(prompt.token_ids, params), self.answer(prompt, params))

    def answer(self, prompt: ChatPrompt, params: SamplingParams) -> ChatAnswer:
        """Returns the reader of the tokens that the model gives for a chat's prompt.

        Raises: RequestError if the prompt cannot be run.
        """
        loaded = self.engine.loaded
        assert loaded.tokenizer is not None, "a chat's prompt was made with the tokenizer"
        request = loaded.request(prompt.token_ids, params)
        return ChatAnswer(loaded.tokenizer, prompt, **reading(request))

    def _told(
        self, result: RequestOutput, prompt: ChatPrompt, params: SamplingParams
    ) -> RequestOutput:
        """Returns a result with the messages of its sequences; their tokens are read once more."""
        outputs = []
        for output in result.outputs:
            answer = self.answer(prompt, params)
            answer.set_cached_tokens(output.metrics.cached_tokens)
            answer.push(output.token_ids)
            outputs.append(dataclasses.replace(output, message=answer.message))
        return dataclasses.replace(result, prompt=prompt.text, outputs=outputs)

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """How this model writes conversations.

        Raises: TokenizerError for a model without a tokenizer, or with a broken template.
        """
        return chat_format(self.config.model_path, self.engine.loaded.tokenizer)


def _answers(
    chunks: Generator[StreamChunk, None, None], answer: ChatAnswer
) -> Generator[list[Event], None, None]:
    with contextlib.closing(chunks):
        for chunk in chunks:
            answer.set_cached_tokens(chunk.cached_tokens)
            if events := answer.push(chunk.token_ids):
                yield events


def _as_chats(messages: Messages | Sequence[Messages]) -> list[Any]:
    items: list[Any] = list(messages) if is_listing(messages) else []
    nested = bool(items) and all(is_listing(item) for item in items)
    return items if nested else [messages]
