"""How fast a server answers: any that speaks OpenAI's API, asked as its clients would, no JAX."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from k26jax.errors import NotServingError, RequestError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Those that tell in each event how many tokens there are so far, if asked to.
_TELL_TOKENS = ("k26jax", "vllm")
_COUNTERS = re.compile(
    r"^\w+[:_]spec_decode_num_(drafts|accepted_tokens)_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE
)


@dataclass(frozen=True)
class Traffic:
    """What is asked of whom, and how fast.

    base_url: of the server, without /v1.
    endpoint: "completions" or "chat".
    bodies: of the requests, in their order; each has a prompt and its limits.
    max_concurrency: requests under way at most; None: no limit.
    request_rate: requests a second, in random gaps (a Poisson process); infinite: at once.
    seed: of the gaps.
    timeout: seconds in which each part of an answer must come.
    """

    base_url: str
    endpoint: str
    bodies: Sequence[dict[str, Any]]
    max_concurrency: int | None = 1
    request_rate: float = float("inf")
    seed: int = 1
    timeout: float = 600.0
    api_key: str | None = None


@dataclass
class Outcome:
    """One request, in seconds since its start.

    started: seconds since the start of the traffic.
    events: of each that brought text: when it came, and how many tokens there were then; None if
        the server does not tell.
    ended: when the answer had ended.
    prompt_tokens, tokens: as the server counts; of one that does not, tokens are events.
    forwards, following_tokens: passes of the target and the tokens that they gave, if it tells.
    error: why there is no answer, or None.
    """

    started: float = 0.0
    events: list[tuple[float, int | None]] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    is_counted: bool = False
    forwards: int = 0
    following_tokens: int = 0
    error: str | None = None


@dataclass
class Run:
    """All of a traffic. seconds: from the first request to the last end."""

    outcomes: list[Outcome]
    seconds: float
    accept_length: float | None


class Client:
    """Asks one server. A context manager; what is measured is `run`."""

    def __init__(self, traffic: Traffic):
        headers = {"authorization": f"Bearer {traffic.api_key}"} if traffic.api_key else {}
        # A proxy would be measured too.
        self._http = httpx.AsyncClient(
            base_url=traffic.base_url,
            headers=headers,
            timeout=traffic.timeout,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._traffic = traffic
        self._tells_tokens = False

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def find_model(self, name: str | None) -> str:
        """Returns the model to ask: the one of a name, or the first that is served.

        Raises: NotServingError if the server does not answer, RequestError for an unknown name.
        """
        url = self._traffic.base_url
        try:
            answer = await self._http.get("/v1/models")
            found = {item["id"]: item for item in answer.json()["data"]}
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise NotServingError(
                f"{url} does not answer ({why}); start a server or give --base-url"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise NotServingError(
                f"{url}/v1/models answered {answer.status_code} and no list of models: "
                f"{answer.text[:200]!r}; give the --base-url of an OpenAI-compatible server, and "
                "--api-key if it wants one"
            ) from error
        if not found or (name is not None and name not in found):
            raise RequestError(f"model {name!r} is not served; served: {', '.join(found)}")
        chosen = name or next(iter(found))
        self._tells_tokens = found[chosen].get("owned_by") in _TELL_TOKENS
        return chosen

    async def run(self, on_done: Callable[[Outcome], None] = lambda outcome: None) -> Run:
        """Returns how all requests went."""
        traffic = self._traffic
        outcomes: list[Outcome] = []
        before = await self._speculation()
        begun = time.perf_counter()
        free = asyncio.Semaphore(traffic.max_concurrency or len(traffic.bodies) or 1)

        async def one(body: dict[str, Any], outcome: Outcome) -> None:
            async with free:
                outcome.started = time.perf_counter() - begun
                await self.ask(body, outcome)
            on_done(outcome)

        tasks = []
        async for body in self._arrivals():
            outcomes.append(Outcome())
            tasks.append(asyncio.create_task(one(body, outcomes[-1])))
        await asyncio.gather(*tasks)
        seconds = max((found.started + found.ended for found in outcomes), default=0.0)
        after = await self._speculation()
        return Run(outcomes, seconds, _accept_length(outcomes, before, after))

    async def _arrivals(self) -> AsyncIterator[dict[str, Any]]:
        """Yields each body when its time has come; a late one does not delay the next."""
        traffic, gaps = self._traffic, random.Random(self._traffic.seed)
        begun, due = time.perf_counter(), 0.0
        for body in traffic.bodies:
            await asyncio.sleep(max(due - (time.perf_counter() - begun), 0.0))
            yield body
            if traffic.request_rate != float("inf"):
                due += gaps.expovariate(traffic.request_rate)

    async def ask(self, body: dict[str, Any], outcome: Outcome) -> None:
        """Fills in how one request goes; whatever goes wrong is its error."""
        options: dict[str, Any] = {"include_usage": True}
        if self._tells_tokens:
            options["continuous_usage_stats"] = True
        body = {**body, "stream": True, "stream_options": options}
        begun = time.perf_counter()
        try:
            path = PATHS[self._traffic.endpoint]
            async with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode("utf-8", "replace")
                    outcome.error = f"{answer.status_code}: {text[:300]}"
                    return
                is_whole = False
                async for line in answer.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    is_whole = data == "[DONE]"
                    if is_whole:
                        break
                    self._take(json.loads(data), outcome, time.perf_counter() - begun)
                if not is_whole:
                    outcome.error = outcome.error or "the stream ended without [DONE]"
        except (httpx.HTTPError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            outcome.ended = time.perf_counter() - begun
            if not outcome.is_counted:
                outcome.tokens = len(outcome.events)
            if outcome.error is None and not outcome.events:
                outcome.error = "the answer has no text"

    def _take(self, event: dict[str, Any], outcome: Outcome, now: float) -> None:
        """Reads one event of a stream."""
        if event.get("error"):
            outcome.error = str(event["error"])[:300]
            return
        usage = event.get("usage") or {}
        if usage.get("completion_tokens") is not None:
            outcome.is_counted = True
            outcome.tokens = usage["completion_tokens"]
            outcome.prompt_tokens = usage.get("prompt_tokens") or 0
        if any(_has_text(choice) for choice in event.get("choices") or ()):
            outcome.events.append((now, outcome.tokens if usage else None))
        own = event.get("k26jax") or {}
        if own.get("target_forwards"):
            outcome.forwards = own["target_forwards"]
            outcome.following_tokens = outcome.tokens - 1

    async def _speculation(self) -> tuple[float, float] | None:
        """Returns the server's drafts and accepted tokens so far; None if it does not tell."""
        try:
            answer = await self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        found: dict[str, float] = {}
        for name, value in _COUNTERS.findall(answer.text if answer.status_code == 200 else ""):
            found[name] = found.get(name, 0.0) + float(value)
        return (found["drafts"], found["accepted_tokens"]) if len(found) == 2 else None


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    thoughts = delta.get("reasoning_content") or delta.get("reasoning")
    return bool(choice.get("text") or delta.get("content") or thoughts or delta.get("tool_calls"))


def _accept_length(
    outcomes: Sequence[Outcome],
    before: tuple[float, float] | None,
    after: tuple[float, float] | None,
) -> float | None:
    """Returns tokens a pass of the target, as the answers tell it, or else the server's metrics."""
    forwards = sum(outcome.forwards for outcome in outcomes)
    if forwards:
        return sum(outcome.following_tokens for outcome in outcomes) / forwards
    if before is None or after is None or after[0] <= before[0]:
        return None
    return 1 + (after[1] - before[1]) / (after[0] - before[0])
