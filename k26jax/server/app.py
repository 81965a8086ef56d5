"""Stage 10, serve: the routes of the server, each a few lines on top of its service."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fastapi
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from k26jax import __version__
from k26jax.errors import K26Error
from k26jax.server.answering import chat_prompt, decode, shown_tokens
from k26jax.server.asking import ask
from k26jax.server.errors import api_error, invalid
from k26jax.server.fields import CHAT, COMPLETION, HONOURED, IGNORED, REFUSED
from k26jax.server.metrics import CONTENT_TYPE
from k26jax.server.middleware import Door, read_body
from k26jax.server.openapi import describe
from k26jax.server.page import PAGE_PATHS, page
from k26jax.server.protocol import ChatBody, CompletionBody, parse_json, read_model
from k26jax.server.service import Service


class AbortBody(BaseModel):
    """Body of POST /abort_request."""

    model_config = ConfigDict(strict=True, extra="forbid")
    rid: str | None = None
    abort_all: bool = False


class TokenizeBody(BaseModel):
    """Body of POST /tokenize: text, or what a chat's prompt is made of."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None


class DetokenizeBody(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    tokens: list[int]


_KINDS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
_BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/abort_request": AbortBody,
}


class Routes:
    """The handlers of one service."""

    def __init__(self, service: Service):
        self._service = service
        # One thread, so that long prompts keep their order and the event loop does not wait.
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="k26jax-prompts")

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(CHAT, request)

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(COMPLETION, request)

    async def _answer(self, kind: str, request: Request) -> Response:
        data = await self._json(request)
        id = request.state.request_id
        reply = await ask(self._service, kind, data, request_id=id, planner=self._planner)
        if reply.unknown:
            reply.headers["x-k26jax-ignored"] = _header(reply.unknown)
        return await reply.send(request)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        names = self._service.settings.served_names
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        return JSONResponse(self._model(self._service.check_model(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "k26jax",
            "max_model_len": self._service.llm.engine.loaded.context_length,
        }

    async def health(self, request: Request) -> Response:
        """GET /health: whether the engine's loop lives."""
        is_healthy, what = self._service.is_healthy()
        return JSONResponse({"status": what}, 200 if is_healthy else 503)

    async def ready(self, request: Request) -> Response:
        """GET /ready: whether requests are taken, and how far the start is."""
        service = self._service
        is_ready = service.is_ready()
        stage = service.stage if service.is_healthy()[0] else "failed"
        body = {"ready": is_ready, "stage": stage, "percent": round(service.percent, 1)}
        return JSONResponse(
            body, 200 if is_ready else 503, {} if is_ready else {"retry-after": "1"}
        )

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def server_info(self, request: Request) -> Response:
        """GET /server_info."""
        fields = {
            kind: {
                "honoured": list(HONOURED[kind]),
                "ignored": list(IGNORED),
                "refused": list(REFUSED[kind]),
            }
            for kind in (CHAT, COMPLETION)
        }
        return JSONResponse(self._service.info() | {"fields": fields})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = read_model(TokenizeBody, await self._json(request))
        self._service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("send one of prompt and messages", param="prompt")
        llm = self._service.llm
        try:
            if body.prompt is not None:
                return JSONResponse(shown_tokens(llm, llm.encode(body.prompt)))
            chat = ChatBody(
                messages=body.messages,
                tools=body.tools,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            return JSONResponse(shown_tokens(llm, chat_prompt(llm, chat).token_ids))
        except K26Error as error:
            raise api_error(error, TokenizeBody.model_fields) from error

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = read_model(DetokenizeBody, await self._json(request))
        self._service.check_model(body.model)
        return JSONResponse({"prompt": decode(self._service.llm, body.tokens)})

    async def abort(self, request: Request) -> Response:
        """POST /abort_request."""
        body = read_model(AbortBody, await self._json(request))
        if (body.rid is None) != body.abort_all:
            raise invalid("send rid, the id of an answer or its x-request-id, or abort_all: true")
        return JSONResponse({"aborted": self._service.abort(body.rid)})

    async def flush(self, request: Request) -> Response:
        """POST /flush_cache: empties the prefix cache; what it says in its body is not read."""
        return JSONResponse({"flushed_tokens": await asyncio.to_thread(self._service.flush)})

    async def _json(self, request: Request) -> dict[str, Any]:
        return parse_json(await read_body(request, self._service.settings.max_body_bytes))


def create_app(service: Service) -> Door:
    """Returns the application of a service."""
    # The pages of FastAPI's documentation are fetched from another host.
    app = fastapi.FastAPI(
        title="k26jax", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    routes = Routes(service)
    for path, method, handler in (
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/completions", "POST", routes.completion),
        ("/v1/models", "GET", routes.models),
        ("/v1/models/{name:path}", "GET", routes.model),
        ("/health", "GET", routes.health),
        ("/ready", "GET", routes.ready),
        ("/metrics", "GET", routes.metrics),
        ("/version", "GET", routes.version),
        ("/server_info", "GET", routes.server_info),
        ("/tokenize", "POST", routes.tokenize),
        ("/detokenize", "POST", routes.detokenize),
        ("/abort_request", "POST", routes.abort),
        ("/flush_cache", "POST", routes.flush),
    ):
        app.add_api_route(path, handler, methods=[method], response_class=JSONResponse)
    for path in PAGE_PATHS:
        app.add_api_route(path, page, methods=["GET"], include_in_schema=False)
    # What these raise goes up to the door, where every error is answered.
    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, _raise)
    describe(app, _BODIES, _KINDS)
    return Door(app, service)


async def _raise(request: Request, error: Exception) -> Response:
    raise error


def _header(names: list[str]) -> str:
    return ",".join(re.sub(r"[^A-Za-z0-9_.-]", "?", name) for name in names)[:1000]
