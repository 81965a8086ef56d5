"""Bodies of requests: read from JSON, checked field by field, turned into sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from k26jax.config import MAX_LOGPROBS
from k26jax.engine.request import SamplingParams
from k26jax.errors import RequestError, nearest
from k26jax.server.errors import ApiError, api_error, invalid
from k26jax.server.fields import CHAT, COMPLETION, HONOURED, check_fields
from k26jax.text.structured import response_structure

Body = TypeVar("Body", bound="Asked")
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "max_tokens", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "structured_outputs",
)  # fmt: skip

_OBJECT = "a dictionary or instance of StreamOptions"


class StreamOptions(BaseModel):
    """What a stream tells besides the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Asked(BaseModel):
    """Fields that both kinds of request have; null is the same as leaving one out."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    structured_outputs: Any = None
    draft_trees: bool | None = None

    def limit(self) -> int | None:
        """Returns how many tokens are asked for at most; None: as many as fit."""
        return self.max_tokens

    def logprobs_count(self) -> int | None:
        """Returns how many of the most likely tokens are told; None: no log-probabilities."""
        return None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns the sampling parameters.

        Raises: ApiError that names the field.
        """
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING}
        given["max_tokens"], given["logprobs"] = self.limit(), self.logprobs_count()
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("max_tokens") == 0:
            raise invalid("max_tokens = 0 asks for no token; send at least 1", param="max_tokens")
        try:
            if (shape := response_structure(self.response_format)) is not None:
                if self.structured_outputs is not None:
                    raise RequestError("response_format and structured_outputs both say the shape")
                given["structured_outputs"] = shape
            return SamplingParams(**(dict(defaults) | given))
        except RequestError as error:
            raise api_error(error, (*_SAMPLING, "logprobs", "response_format")) from error


class ChatBody(Asked):
    """Body of POST /v1/chat/completions; what has no type here is checked where it is read."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    thinking: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None

    def limit(self) -> int | None:
        """See `Asked`.

        Raises: ApiError if the two fields differ.
        """
        one, other = self.max_tokens, self.max_completion_tokens
        if one is not None and other is not None and one != other:
            raise invalid(
                f"max_tokens = {one} and max_completion_tokens = {other} differ; send one",
                param="max_completion_tokens",
            )
        return one if other is None else other

    def logprobs_count(self) -> int | None:
        """See `Asked`.

        Raises: ApiError for top_logprobs out of bounds, or without logprobs.
        """
        count = self.top_logprobs or 0
        if not 0 <= count <= MAX_LOGPROBS:
            raise invalid(
                f"top_logprobs = {count}, expected an integer from 0 to {MAX_LOGPROBS}",
                param="top_logprobs",
            )
        if count and not self.logprobs:
            raise invalid(
                f"top_logprobs = {count} without logprobs; send logprobs: true",
                param="top_logprobs",
            )
        return count if self.logprobs else None


class CompletionBody(Asked):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def logprobs_count(self) -> int | None:
        """See `Asked`.

        Raises: ApiError if the prompt's would be told too.
        """
        if self.logprobs is not None and self.echo:
            raise invalid(
                "logprobs with echo asks for those of the prompt, which are not there; leave one "
                "of the two out",
                "unsupported_parameter",
                param="logprobs",
            )
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts one by one.

        Raises: ApiError if there is none.
        """
        prompt = self.prompt
        if prompt is None or prompt == []:
            raise invalid("prompt is missing; send text or token ids", param="prompt")
        if isinstance(prompt, str) or all(isinstance(item, int) for item in prompt):
            return [prompt]  # type: ignore[list-item]
        return list(prompt)  # type: ignore[arg-type]


def parse_json(raw: bytes) -> dict[str, Any]:
    """Returns the object that a body holds.

    Raises: ApiError for anything else.
    """
    try:
        data = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid("the body is nested too deep", "invalid_json") from None
    except ValueError as error:
        raise invalid(f"the body is not JSON in UTF-8: {error}", "invalid_json") from None
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise invalid(f"the body is a JSON {kind}, expected an object", "invalid_json")
    return data


def read_asked(
    kind: str, data: dict[str, Any], *, refuses_unknown: bool = True
) -> tuple[ChatBody | CompletionBody, list[str]]:
    """Returns a body of a kind, and the unknown fields that were passed over.

    Raises: ApiError that names the field.
    """
    unknown = check_fields(kind, data, refuses_unknown=refuses_unknown)
    model = ChatBody if kind == CHAT else CompletionBody
    body = read_model(model, {name: data[name] for name in HONOURED[kind] if name in data})
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is given without stream", param="stream_options")
    if kind == COMPLETION:
        assert isinstance(body, CompletionBody)
        body.prompts()
    return body, unknown


def read_model(model: type[Body] | type[BaseModel], data: dict[str, Any]) -> Any:
    """Returns a checked model.

    Raises: ApiError that names the field, not its value.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _validation_error(model, error) from None
    except RecursionError:
        raise invalid("the body is nested too deep", "invalid_json") from None


def _validation_error(model: type[BaseModel], error: ValidationError) -> ApiError:
    details: ErrorDetails = error.errors(include_url=False, include_input=False)[0]
    is_unknown = details["type"] == "extra_forbidden"
    # Of an unknown field all is a name that the client chose; else types of unions are in between.
    path = [p for p in details["loc"] if is_unknown or isinstance(p, int) or p.islower()]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:80]
    if is_unknown:
        known = list(StreamOptions.model_fields if len(path) > 1 else model.model_fields)
        hint = nearest(str(path[-1])[:80], known)
        return invalid(f"field {name!r} is unknown{hint}", "unsupported_parameter", param=name)
    # The branches of a union are named after types, which clients need not see.
    root = name.partition(".")[0].partition("[")[0]
    if len({str(item["loc"][:1]) for item in error.errors()}) == 1 and error.error_count() > 1:
        annotation = model.model_fields[root].annotation
        return invalid(f"{root} is of the wrong type, expected {_shown(annotation)}", param=root)
    message = details["msg"].replace("Input should be", "should be").replace("a valid i", "an i")
    message = message.replace("valid ", "").replace(_OBJECT, "an object")
    # A name that is no text, as one with half a surrogate pair, cannot be told.
    return invalid(f"{name} {message}".lstrip(), param=name or None)


def _shown(annotation: Any) -> str:
    return str(annotation).replace(" | None", "").replace("typing.", "")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
