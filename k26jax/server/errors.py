"""Every error as the JSON object that OpenAI clients read; one table from class to status."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from starlette.responses import JSONResponse

from k26jax.errors import (
    BusyError,
    CapacityError,
    ContextLengthError,
    EngineFailedError,
    K26Error,
    NotServingError,
    QueueFullError,
    RequestError,
    TokenizerError,
)
from k26jax.text.tokenizer import replace_surrogates

_RETRY = {"retry-after": "1"}
_MAX_MESSAGE = 1000
# The first class that fits: status, type, code, headers.
_TABLE: tuple[tuple[type[K26Error], int, str, str, dict[str, str]], ...] = (
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded", {}),
    (QueueFullError, 429, "rate_limit_error", "queue_full", _RETRY),
    (BusyError, 409, "invalid_request_error", "busy", _RETRY),
    (EngineFailedError, 500, "server_error", "engine_error", {}),
    (NotServingError, 503, "service_unavailable", "not_ready", _RETRY),
    (RequestError, 400, "invalid_request_error", "invalid_value", {}),
    (TokenizerError, 400, "invalid_request_error", "unsupported_model", {}),
    (CapacityError, 400, "invalid_request_error", "invalid_value", {}),
)


class ApiError(Exception):
    """An answer that says no."""

    def __init__(
        self,
        status: int,
        kind: str,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.message, self.headers = message[:_MAX_MESSAGE], headers or {}

    def record(self) -> dict[str, Any]:
        """Returns the body."""
        error = {
            "message": replace_surrogates(self.message),
            "type": self.kind,
            "param": None if self.param is None else replace_surrogates(self.param),
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """Returns the answer."""
        return JSONResponse(self.record(), self.status, self.headers)


def invalid(message: str, code: str = "invalid_value", *, param: str | None = None) -> ApiError:
    """Returns the error of a request whose sender has to change it."""
    return ApiError(400, "invalid_request_error", code, message, param=param)


def not_found(message: str, code: str = "not_found", *, param: str | None = None) -> ApiError:
    """Returns the error of a request for something that is not here."""
    return ApiError(404, "invalid_request_error", code, message, param=param)


def api_error(error: BaseException, fields: Collection[str] = ()) -> ApiError:
    """Returns an exception as an answer; the message of one that no request causes stays here.

    Args:
        fields: names of the request's fields; a message that begins with one is about it.
    """
    if isinstance(error, ApiError):
        return error
    for kind, status, name, code, headers in _TABLE:
        if isinstance(error, kind):
            message = str(error)
            return ApiError(
                status, name, code, message, param=_param(message, fields), headers=headers
            )
    message = "the server failed on this request; its log has the details under the request's id"
    return ApiError(500, "server_error", "engine_error", message)


def _param(message: str, fields: Collection[str]) -> str | None:
    """Returns the field that a message begins with, such as `messages[0].role`."""
    match = re.match(r"([a-z_]+)[\w.\[\]]*", message)
    return match[0].rstrip(".") if match and match[1] in fields else None
