"""A runner that replays token lists in given accepted runs, and a real server on top of it."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from fixtures.paths import REPOSITORY

from k26jax.config import EngineConfig
from k26jax.engine.engine import Engine
from k26jax.engine.loading import Prepared, prepare
from k26jax.engine.request import Request
from k26jax.llm import LLM
from k26jax.server.run import WebThread, bind, url_of
from k26jax.server.service import Service
from k26jax.server.settings import ServerSettings

TARGET = REPOSITORY / "checkpoints" / "k26-tiny"
NAME = "tiny"
Script = Callable[[Request], Sequence[Sequence[int]]]


class ScriptedRunner:
    """Gives each request the runs that a script has for it, then its first stop id for ever.

    Attributes:
        gate: every device call waits for it.
        pace: seconds that a step takes.
        calls: the names of the calls, with their slots.
        error: raised by the next step, if set.
        traced: whether each dispatch recorded trees.
    """

    def __init__(self, slots: int, script: Script):
        self.slots, self.script = slots, script
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, int]] = []
        self.pace = 0.0
        self.error: Exception | None = None
        self.pages = None
        self.traced: list[bool] = []
        self._roots: dict[int, int] = {}
        self._left: dict[int, deque[list[int]]] = {}
        self._stops: dict[int, int] = {}
        self._prompts: dict[int, deque[int | None]] = {}
        self._emitted: dict[int, int] = {}
        self._first = 0

    def restore(self) -> None:
        pass

    def close(self) -> None:
        pass

    def begin(self, slot: int, request: Request) -> None:
        assert slot not in self._left, f"slot {slot} is in use"
        runs = [list(run) for run in self.script(request) if len(run)]
        first, rest = runs[0][0], [runs[0][1:], *runs[1:]]
        self._left[slot] = deque(run for run in rest if run)
        self._stops[slot] = request.stop_ids[0] if request.stop_ids else first
        size = prepared(2, 512).config.chunked_prefill_size
        chunks = -(-len(request.prompt_token_ids) // size)
        self._prompts[slot] = deque([*[None] * (chunks - 1), first])

    def prefill_next(self, slot: int) -> int | None:
        self.calls.append(("prefill", slot))
        assert self.gate.wait(30)
        first = self._prompts[slot].popleft()
        if first is not None:
            del self._prompts[slot]
            self._emitted[slot], self._first = 1, first
            self._roots[slot] = first
        return first

    def first_log_probs(self, slot: int) -> list[np.ndarray]:
        return [np.asarray(part)[None, None] for part in told_of(0, self._first)]

    def cached_tokens(self, slot: int) -> int:
        return 0

    def flush(self) -> int:
        return 0

    def run(self, limit: int, *, record_trees: bool = False) -> Any:
        self.calls.append(("run", limit))
        self.traced.append(record_trees)
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        time.sleep(self.pace * limit)
        steps = [self._step() for _ in range(limit)]
        width = max(len(run) for step in steps for run in step.values())
        shape = limit, self.slots, width
        tokens = np.zeros(shape, np.int32)
        counts = np.zeros((limit, self.slots), np.int32)
        told = [np.zeros(shape + np.shape(part)) for part in told_of(0, 0)]
        for number, step in enumerate(steps):
            for slot, run in step.items():
                tokens[number, slot, : len(run)], counts[number, slot] = run, len(run)
                for place, token in enumerate(run):
                    for array, part in zip(told, told_of(self._emitted[slot], token), strict=True):
                        array[number, slot, place] = part
                    self._emitted[slot] += 1
        trees, paths = self._trees(steps, width) if record_trees else (None, None)
        return SimpleNamespace(
            n_run=limit,
            tokens=tokens,
            emitted_len=counts,
            accepted_len=counts,
            log_probs=told,
            rows=None,
            trees=trees,
            paths=paths,
        )

    def _trees(self, steps: list[dict[int, list[int]]], width: int) -> tuple[Any, np.ndarray]:
        """For each run a tree: the accepted path, and one more child of the root, its last node."""
        shape = (len(steps), self.slots, width + 1)
        trees = SimpleNamespace(
            valid=np.zeros(shape, bool),
            token_ids=np.zeros(shape, np.int32),
            parent=np.zeros(shape, np.int32),
            depth=np.zeros(shape, np.int32),
        )
        paths = np.zeros((len(steps), self.slots, width), np.int32)
        for number, step in enumerate(steps):
            for slot, run in step.items():
                at, count = (number, slot), len(run)
                nodes = [self._roots[slot], *run[:-1], 1]
                trees.valid[at][: count + 1] = True
                trees.token_ids[at][: count + 1] = nodes
                trees.parent[at][1:count] = range(count - 1)
                trees.depth[at][:count], trees.depth[at][count] = range(count), 1
                paths[at][:count] = range(count)
                self._roots[slot] = run[-1]
        return trees, paths

    def release(self, slot: int) -> None:
        self.calls.append(("release", slot))
        del self._left[slot]
        self._prompts.pop(slot, None)

    @property
    def busy(self) -> list[int]:
        return list(self._left)

    def _step(self) -> dict[int, list[int]]:
        return {
            slot: left.popleft() if left else [self._stops[slot]]
            for slot, left in self._left.items()
            if slot not in self._prompts
        }


def told_of(position: int, token: int) -> tuple[float, int, list[int], list[float]]:
    """A token's log-probability and rank, and the likeliest tokens there; odd ones are unlikely."""
    if position % 2:
        return -9.5, 70, [11, 12, 13], [-0.25, -2.0, -3.0]
    return -position / 8, 1, [token, 12, 13], [-position / 8, -2.0, -float("inf")]


@functools.cache
def prepared(slots: int, context: int) -> Prepared:
    return prepare(
        EngineConfig(
            model_path=str(TARGET), max_running_requests=slots, context_length=context, tp_size=1
        )
    )


class Server:
    """A running server, and a client of it."""

    def __init__(self, service: Service, llm: LLM, url: str):
        self.service, self.llm, self.url = service, llm, url
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    @property
    def runner(self) -> Any:
        return self.llm.engine.runner

    def chat(self, **body: Any) -> httpx.Response:
        messages = {"messages": [{"role": "user", "content": "hi"}]}
        return self.http.post("/v1/chat/completions", json=messages | body)

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "import"} | body)

    def wait_idle(self) -> None:
        assert self.service.scheduler.wait_idle(10)


@contextlib.contextmanager
def served(llm: LLM, **settings: Any) -> Iterator[Server]:
    """A real server of an LLM on a free port."""
    service = Service(ServerSettings(**({"served_names": (NAME,)} | settings)))
    sock = bind("127.0.0.1", 0)
    web = WebThread(service, sock)
    web.start()
    try:
        service.open(llm)
        server = Server(service, llm, url_of(sock))
        with server.http:
            yield server
    finally:
        service.drain(0)
        web.stop()


@contextlib.contextmanager
def scripted(
    script: Script, *, slots: int = 2, context: int = 512, **settings: Any
) -> Iterator[Server]:
    """A real server of a scripted runner with the trained model's tokenizer."""
    runner: Any = ScriptedRunner(slots, script)
    loaded: Any = prepared(slots, context)
    with served(LLM.from_engine(Engine(loaded, runner)), **settings) as server:
        yield server
        runner.gate.set()


def ids_of(text: str) -> list[int]:
    """The ids of an answer in which control tokens are written out."""
    tokenizer = prepared(2, 512).tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text, allow_special=True)


def events_of(raw: bytes) -> list[str]:
    """The data of a stream's events; fails unless every byte is where the rules want it."""
    text = raw.decode("utf-8")
    assert text.endswith("data: [DONE]\n\n")
    blocks = [block for block in text.split("\n\n")[:-1] if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert text.count("[DONE]") == 1
    return [block.removeprefix("data: ") for block in blocks[:-1]]
