"""From a checked body to a reply: the chat and the completion routes, and the texts of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from k26jax.engine.output import reading
from k26jax.engine.request import Request, SamplingParams
from k26jax.errors import ContextLengthError, K26Error
from k26jax.llm import LLM
from k26jax.server.choices import ChatChoice, Choice, TextChoice
from k26jax.server.errors import api_error, invalid
from k26jax.server.fields import CHAT, COMPLETION, HONOURED
from k26jax.server.logprobs import TokenLogprobs
from k26jax.server.protocol import Asked, ChatBody, CompletionBody
from k26jax.server.settings import ServerSettings
from k26jax.text.answer import ChatAnswer
from k26jax.text.chat import ChatPrompt
from k26jax.text.thinking import read_thinking
from k26jax.text.tokenizer import replace_surrogates
from k26jax.text.tools import check_tools, choose_tools

_SHAPING = ("response_format", "structured_outputs", "tool_choice", "parallel_tool_calls")


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a body asks for: its choices, a request for each, and how many prompts they are of."""

    requests: list[Request]
    choices: list[Choice]
    prompts: int


def plan_chat(llm: LLM, body: ChatBody, settings: ServerSettings) -> Planned:
    """Returns what a chat asks for.

    Raises: ApiError that names the field.
    """
    params = body.params(settings.defaults)
    _check_count(1, params, settings)
    try:
        prompt = chat_prompt(llm, body)
        _check_structure(llm, body, params)
        params = llm.shaped(prompt, params, body.tool_choice, body.parallel_tool_calls)
        _check_backend(body, params, settings)
        requests = _requests(llm, prompt.token_ids, params)
    except K26Error as error:
        raise api_error(error, HONOURED[CHAT]) from error
    tokenizer = llm.engine.loaded.tokenizer
    assert tokenizer is not None, "a chat's prompt was made with the tokenizer"
    choices = [
        ChatChoice(index, ChatAnswer(tokenizer, prompt, **reading(request)), _told(llm, params))
        for index, request in enumerate(requests)
    ]
    return Planned(requests, list(choices), 1)


def chat_prompt(llm: LLM, body: ChatBody) -> ChatPrompt:
    """Returns the prompt of a chat.

    Raises: K26Error for what the model's format has not.
    """
    said = read_thinking(body.thinking, body.chat_template_kwargs, body.reasoning_effort)
    return llm.chat_format.prompt(
        body.messages,
        choose_tools(check_tools(body.tools), body.tool_choice),
        thinking=said.is_on,
        preserve_thinking=said.is_preserved,
        options=said.options,
    )


def plan_completion(llm: LLM, body: CompletionBody, settings: ServerSettings) -> Planned:
    """Returns what a completion asks for; choices stand prompt by prompt.

    Raises: ApiError that names the field.
    """
    params = body.params(settings.defaults)
    prompts = body.prompts()
    _check_count(len(prompts), params, settings)
    _check_backend(body, params, settings)
    requests: list[Request] = []
    choices: list[Choice] = []
    for prompt in prompts:
        try:
            ids = llm.encode(prompt)
            _check_structure(llm, body, params)
            found = _requests(llm, ids, params)
        except K26Error as error:
            raise api_error(error, HONOURED[COMPLETION]) from error
        echo = ""
        if body.echo:
            echo = replace_surrogates(prompt) if isinstance(prompt, str) else decode(llm, ids)
        choices += [
            TextChoice(len(choices) + i, len(ids), echo, _told(llm, params))
            for i in range(len(found))
        ]
        requests += found
    return Planned(requests, choices, len(prompts))


def decode(llm: LLM, token_ids: Sequence[int]) -> str:
    """Returns the text of token ids, control tokens by name.

    Raises: ApiError for a model without a tokenizer, or an id outside of the vocabulary.
    """
    tokenizer = llm.engine.loaded.tokenizer
    if tokenizer is None:
        raise invalid("this model has no tokenizer; there is no text", "unsupported_model")
    size = llm.engine.loaded.models.target.config.vocab_size
    for token in token_ids:
        if not 0 <= token < size:
            raise invalid(f"tokens hold {token}, outside the vocabulary of {size}", param="tokens")
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def _requests(llm: LLM, ids: list[int], params: SamplingParams) -> list[Request]:
    """Returns the requests of a prompt; all tokens that are asked for fit in the context.

    Raises: ContextLengthError with the three numbers, RequestError.
    """
    context = llm.engine.loaded.context_length
    asked = params.max_tokens
    if asked is not None and len(ids) + asked > context:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens and max_tokens is {asked}, together "
            f"{len(ids) + asked}; the context holds {context}; shorten the prompt or lower "
            "max_tokens"
        )
    return llm.requests(ids, params)


def _told(llm: LLM, params: SamplingParams) -> TokenLogprobs | None:
    """Returns what collects the log-probabilities of a sequence, if they are asked for.

    Raises: ApiError for a model without a tokenizer.
    """
    if params.logprobs is None:
        return None
    tokenizer = llm.engine.loaded.tokenizer
    if tokenizer is None:
        message = "logprobs are told by the tokens' text, and this model has no tokenizer"
        raise invalid(message, "unsupported_model", param="logprobs")
    return TokenLogprobs(tokenizer, params.logprobs)


def _check_structure(llm: LLM, body: Asked, params: SamplingParams) -> None:
    """Raises RequestError that names response_format, where a shape that it gives cannot be had."""
    if params.structured_outputs is not None and body.response_format is not None:
        llm.engine.loaded.grammars.check(params.structured_outputs, "response_format")


def _check_backend(body: Asked, params: SamplingParams, settings: ServerSettings) -> None:
    """Raises ApiError for an answer of a given shape where the server was told to have none."""
    if params.structured_outputs is None or settings.shapes_answers:
        return
    given = (name for name in _SHAPING if getattr(body, name, None) is not None)
    name = next(given, "structured_outputs")
    raise invalid(
        f"{name} takes constrained decoding, and this server runs with --grammar-backend none",
        "unsupported_parameter",
        param=name,
    )


def _check_count(prompts: int, params: SamplingParams, settings: ServerSettings) -> None:
    count = prompts * params.n
    if count > settings.max_sequences:
        raise invalid(
            f"{prompts} prompts with n = {params.n} are {count} sequences; one request may have "
            f"{settings.max_sequences}",
            param="n",
        )


def shown_tokens(llm: LLM, ids: list[int]) -> dict[str, Any]:
    """Returns the answer of /tokenize."""
    return {"tokens": ids, "count": len(ids), "max_model_len": llm.engine.loaded.context_length}
