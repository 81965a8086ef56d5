"""An answer on its way to the client: one JSON object, or a stream of events; ended if it goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from k26jax.engine.output import StreamChunk
from k26jax.engine.request import Request
from k26jax.server import logs
from k26jax.server.choices import Choice, speculation, total_usage
from k26jax.server.errors import api_error
from k26jax.server.protocol import Asked
from k26jax.server.service import Item, Sequences, Service
from k26jax.server.trees import trees_record

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
_GONE = 499
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass
class Reply:
    """What answers one request.

    model: the name to answer with.
    kind: "chat.completion" or "text_completion".
    requests: one for each choice.
    prompts: how many prompts they are of.
    unknown: fields of the body that were passed over.
    headers: further headers of the answer.
    """

    service: Service
    body: Asked
    model: str
    kind: str
    requests: Sequence[Request]
    choices: list[Choice]
    prompts: int
    request_id: str
    unknown: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.kind == "chat.completion" else "cmpl"
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self._shared = {
            "id": self.id,
            "object": self.kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.service.fingerprint(),
        }

    async def send(self, request: HttpRequest) -> Response:
        """Returns the answer, or for a stream what will send it.

        Raises: K26Error if no answer can be begun.
        """
        if self.body.stream:
            is_traced = bool(self.body.draft_trees)
            return EventStream(self, self._submit(is_streamed=True, is_traced=is_traced))
        sequences = self._submit(is_streamed=False)
        try:
            body = await until_gone(request.receive, self._whole(sequences))
        finally:
            self._over(sequences)
        if body is None:
            return Response(status_code=_GONE)
        timing = {"server-timing": sequences.timing()}
        return JSONResponse(body, headers=self.headers | timing)

    async def answer(self) -> dict[str, Any]:
        """Returns the body of the whole answer, for who asks without HTTP.

        Raises: K26Error if no answer can be begun, EngineFailedError if the engine fails.
        """
        sequences = self._submit(is_streamed=False)
        try:
            return await self._whole(sequences)
        finally:
            self._over(sequences)

    def _submit(self, **how: bool) -> Sequences:
        return self.service.submit(self.id, self.request_id, self.requests, **how)

    async def _whole(self, sequences: Sequences) -> dict[str, Any]:
        async with contextlib.aclosing(sequences.items()) as items:
            async for found in items:
                assert found is not None
                index, item = found
                self.choices[index].take(item)
        return {
            **self._shared,
            "choices": [choice.record() for choice in self.choices],
            "usage": total_usage(self.choices, self.prompts),
            "k26jax": speculation(self.choices),
        }

    async def events(self, sequences: Sequences) -> AsyncGenerator[bytes, None]:
        """Yields the bytes of a stream, those of one step together; the last end it."""
        try:
            yield b"".join(
                self._event([piece]) for choice in self.choices for piece in choice.opening()
            )
            patience = self.service.settings.keepalive_seconds
            async with contextlib.aclosing(sequences.items(patience)) as items:
                async for found in items:
                    if found is None:
                        yield KEEPALIVE
                        continue
                    index, item = found
                    pieces = self.choices[index].take(item)
                    yield self._trees(index, item)
                    if pieces:
                        yield b"".join(self._event([piece]) for piece in pieces)
            options = self.body.stream_options
            if options is not None and options.include_usage:
                usage = total_usage(self.choices, self.prompts)
                yield self._event([], speculation(self.choices), usage=usage)
        except Exception as error:
            found = api_error(error)
            logs.event("stream_failed", logging.ERROR, request_id=self.request_id, code=found.code)
            self.service.metrics.refused(found.code)
            yield _data(found.record())
        yield DONE

    def _trees(self, index: int, item: Item) -> bytes:
        """Returns the event of the trees behind an item; nothing unless they were asked for."""
        traces = item.traces if isinstance(item, StreamChunk) else []
        if not traces or not self.body.draft_trees:
            return b""
        tokenizer = self.service.llm.engine.loaded.tokenizer
        return self._event([], trees_record(index, traces, tokenizer))

    def _event(
        self, choices: list[dict[str, Any]], own: dict[str, Any] | None = None, **more: Any
    ) -> bytes:
        kind = "chat.completion.chunk" if self.kind == "chat.completion" else self.kind
        record = self._shared | {"object": kind, "choices": choices}
        options = self.body.stream_options
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            record["usage"] = None
            if options.continuous_usage_stats:
                record["usage"] = total_usage(self.choices, self.prompts)
                own = speculation(self.choices) | (own or {})
        return _data(record | more | ({"k26jax": own} if own else {}))

    def _over(self, sequences: Sequences) -> None:
        """Ends what is left and logs how it went."""
        self.service.forget(self.id)
        jobs = sequences.jobs
        metrics = speculation(self.choices)
        begun = min(job.queued_at for job in jobs)
        firsts = [job.first_at for job in jobs if job.first_at is not None]
        logs.event(
            "answered",
            request_id=self.request_id,
            id=self.id,
            prompt_tokens=total_usage(self.choices, self.prompts)["prompt_tokens"],
            output_tokens=sum(job.tokens for job in jobs),
            ttft_seconds=round(min(firsts) - begun, 4) if firsts else None,
            seconds=round(time.monotonic() - begun, 4),
            accept_length=metrics["accept_length"],
            finish=",".join(job.outcome or "abort" for job in jobs),
        )


class EventStream(Response):
    """A response that sends a reply's events; a client that goes ends its sequences."""

    def __init__(self, reply: Reply, sequences: Sequences):
        super().__init__(headers=_HEADERS | reply.headers)
        del self.headers["content-length"]
        self._reply, self._sequences = reply, sequences

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send(send))
        finally:
            self._reply._over(self._sequences)

    async def _send(self, send: Send) -> bool:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with contextlib.aclosing(self._reply.events(self._sequences)) as events:
            async for data in events:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def until_gone(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """Returns what some work gives; None if the client went before, and the work is cancelled."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _data(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
