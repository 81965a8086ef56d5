"""What every request goes through: an id, a key, and an answer in JSON whatever goes wrong."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from k26jax.server import logs
from k26jax.server.errors import ApiError, api_error, invalid, not_found
from k26jax.server.page import PAGE_PATHS
from k26jax.server.service import Service

OPEN_PATHS = ("/health", "/ready", "/metrics", "/version", *PAGE_PATHS)
_NOT_HERE = ("/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/audio", "/v1/images", "/api")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_BEARER = re.compile(r"Bearer +([^ ]+) *", re.IGNORECASE)


class Door:
    """Names each request, checks its key, and turns what is raised into answers."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, begun, status = Headers(scope=scope), time.monotonic(), 0
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check_key(scope["path"], headers.get("authorization", ""))
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            logs.event("gone", request_id=request_id, path=scope["path"])
        except Exception as error:
            if status:
                raise
            await self._answer(error, scope, request_id)(scope, receive, send_named)
        logs.event(
            "http",
            logging.DEBUG,
            request_id=request_id,
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=round(time.monotonic() - begun, 4),
        )

    def _check_key(self, path: str, authorization: str) -> None:
        keys = self._service.settings.api_keys
        if not keys or path in OPEN_PATHS:
            return
        match = _BEARER.fullmatch(authorization)
        given = match[1].encode("latin-1") if match else b""
        # Every key is compared, each in a time that does not depend on where they differ.
        found = [hmac.compare_digest(given, key.encode()) for key in keys]
        if not any(found):
            raise ApiError(
                401,
                "authentication_error",
                "invalid_api_key",
                "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'",
                headers={"www-authenticate": "Bearer"},
            )

    def _answer(self, error: Exception, scope: Scope, request_id: str) -> Response:
        found = _http_error(error, scope) if isinstance(error, HTTPException) else api_error(error)
        if found.status == 500:
            logs.LOG.error("failed", exc_info=error, extra={"fields": {"request_id": request_id}})
        else:
            logs.event(
                "refused",
                logging.WARNING,
                request_id=request_id,
                path=scope["path"][:100],
                status=found.status,
                code=found.code,
                param=found.param,
            )
        self._service.metrics.refused(found.code)
        return found.response()


def _http_error(error: HTTPException, scope: Scope) -> ApiError:
    path, method = scope["path"][:100], scope["method"]
    if error.status_code == 405:
        message = f"{method} is not possible on {path}; it takes {_allowed(error)}"
        headers = dict(error.headers or {})
        return ApiError(405, "invalid_request_error", "not_found", message, headers=headers)
    if error.status_code == 404:
        hint = " and will not be: this server has chat and text completions" if any(
            path.startswith(prefix) for prefix in _NOT_HERE
        ) else "; see /openapi.json for what is"  # fmt: skip
        return not_found(f"{method} {path} is not here{hint}")
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ApiError(error.status_code, kind, "http_error", str(error.detail))


def _allowed(error: HTTPException) -> str:
    return (error.headers or {}).get("Allow", "another method")


async def read_body(request: Request, limit: int) -> bytes:
    """Returns the body of a request.

    Raises: ApiError for one that is too large, encoded, or said to be no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid(
            f"content-type is {kind!r:.80}, expected application/json; with curl: "
            "-H 'content-type: application/json'",
            "invalid_json",
        )
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise invalid(f"content-encoding {encoding!r:.80} is not read; send plain JSON")
    length = request.headers.get("content-length", "")
    size, parts = 0, []
    if length.isdigit() and int(length) > limit:
        raise _too_large(int(length), limit)
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(size, limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(size: int, limit: int) -> ApiError:
    message = f"the body has {size} bytes or more, at most {limit} are read (--max-body-mb)"
    return ApiError(413, "invalid_request_error", "request_too_large", message)
