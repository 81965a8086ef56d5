"""A file of requests in OpenAI's batch format, answered on the server's own road without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from k26jax.batch_files import BadLine, Line, encode, pieces, read_lines, record_of
from k26jax.errors import EngineFailedError, K26Error
from k26jax.server import logs
from k26jax.server.asking import ask
from k26jax.server.errors import ApiError, api_error, invalid
from k26jax.server.service import Service
from k26jax.server.settings import ServerSettings

_PLACES = 2  # lines under way for each slot: while one runs, the next one waits
Write = Callable[[dict[str, Any]], None]


@dataclass
class Summary:
    """How a batch went so far.

    succeeded, failed, skipped: lines; skipped ones were answered by an earlier run.
    tokens, forwards: generated tokens, and decoding passes through the target (prefills aside).
    following_tokens: tokens of finished lines that those passes gave.
    was_interrupted: the lines after a signal were not read.
    """

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0
    forwards: int = 0
    following_tokens: int = 0
    was_interrupted: bool = False
    begun: float = field(default_factory=time.perf_counter)

    @property
    def lines(self) -> int:
        """Lines dealt with."""
        return self.succeeded + self.failed + self.skipped

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all lines together over the time since the start."""
        return self.tokens / max(time.perf_counter() - self.begun, 1e-9)

    @property
    def accept_length(self) -> float:
        """Tokens per target forward of the finished lines; 0 without any."""
        return self.following_tokens / self.forwards if self.forwards else 0.0


class _Batch:
    """One run: as many lines under way as there are slots, and as many again that wait.

    Attributes:
        was_ended: lines under way were ended by a second Ctrl-C.
    """

    def __init__(self, service: Service, lines: Iterator[Line | BadLine], write: Write):
        self.summary = Summary()
        self._service, self._lines, self._write = service, lines, write
        self._seed = service.llm.config.seed
        self._places = _PLACES * service.llm.engine.runner.slots
        self._workers: list[asyncio.Task[None]] = []
        self.was_ended = False

    async def run(self, done: Collection[str], on_progress: Callable[[Summary], None]) -> None:
        """Answers every line that is not done."""
        with self._watching_ctrl_c(), ThreadPoolExecutor(1, "k26jax-prompts") as planner:
            work = [self._work(done, planner, on_progress) for _ in range(self._places)]
            self._workers = [asyncio.create_task(item) for item in work]
            try:
                await asyncio.gather(*self._workers)
            except asyncio.CancelledError:
                if not self.was_ended:
                    raise
            finally:
                for worker in self._workers:
                    worker.cancel()
                await asyncio.gather(*self._workers, return_exceptions=True)

    async def _work(
        self,
        done: Collection[str],
        planner: ThreadPoolExecutor,
        on_progress: Callable[[Summary], None],
    ) -> None:
        summary = self.summary
        for line in self._lines:
            if isinstance(line, BadLine):
                self._fail(line, None, invalid(line.error, "invalid_line"))
            elif line.custom_id in done:
                summary.skipped += 1
                await asyncio.sleep(0)  # others may have ended meanwhile
            else:
                await self._answer(line, planner)
            summary.tokens = self._service.metrics.tokens
            on_progress(summary)
            if summary.was_interrupted:
                return

    async def _answer(self, line: Line, planner: ThreadPoolExecutor) -> None:
        id, body = f"req-{secrets.token_hex(12)}", line.body
        if body.get("seed") is None:
            body = body | {"seed": seed_of(self._seed, line.custom_id)}
        try:
            if body.get("stream"):
                raise invalid("stream is of HTTP; leave it out of a batch", param="stream")
            reply = await ask(self._service, line.kind, body, request_id=id, planner=planner)
            answer = await reply.answer()
        except EngineFailedError as error:
            raise self._service.scheduler.error or error from None
        except Exception as error:
            if not isinstance(error, ApiError | K26Error):
                fields = {"request_id": id, "line": line.number}
                logs.LOG.error("failed", exc_info=error, extra={"fields": fields})
            self._fail(line, id, api_error(error))
            return
        summary, forwards = self.summary, answer["k26jax"]["target_forwards"]
        summary.succeeded += 1
        summary.forwards += forwards
        if forwards:
            tokens = answer["usage"]["completion_tokens"]
            summary.following_tokens += tokens - len(answer["choices"])
        self._write(record_of(line.custom_id, id, 200, answer))

    def _fail(self, line: Line | BadLine, request_id: str | None, error: ApiError) -> None:
        """Answers a line with an error; one that was no request has no response."""
        self.summary.failed += 1
        record = record_of(line.custom_id, request_id, error.status, error.record())
        if request_id is None:
            record["response"] = None
        message = error.record()["error"]["message"]
        record["error"] = {"code": error.code, "message": message, "line": line.number}
        self._write(record)

    @contextlib.contextmanager
    def _watching_ctrl_c(self) -> Iterator[None]:
        """The first Ctrl-C reads no more lines, a second one ends those under way."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_ctrl_c)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _on_ctrl_c(self) -> None:
        if not self.summary.was_interrupted:
            self.summary.was_interrupted = True
            text = "interrupted: the lines under way are finished; Ctrl-C again ends them"
            tqdm.write(text, file=sys.stderr)
            return
        self.was_ended = True
        for worker in self._workers:
            worker.cancel()


def run_batch(
    service: Service,
    lines: Iterable[bytes],
    write: Write,
    *,
    done: Collection[str] = (),
    on_progress: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Returns how it went, after one record was written for every line that `done` lacks.

    Records come in the order in which requests end. A line is read when there is a place for it,
    so of the file's lines only their custom_ids are kept. A line without a seed gets one from the
    engine's and its custom_id, and so the same tokens wherever it stands and whenever it is run.

    Args:
      service: serves a model, and nobody else; `settings_for` has its settings.
      write: called with each record; what it raises ends the batch.
      on_progress: called after every line.

    Raises: KeyboardInterrupt after a second Ctrl-C, and what made the engine fail.
    """
    batch = _Batch(service, read_lines(lines), write)
    asyncio.run(batch.run(done, on_progress))
    if batch.was_ended:
        raise KeyboardInterrupt
    return batch.summary


def run_files(service: Service, source: Path, target: Path, *, done: Collection[str]) -> Summary:
    """Returns how it went, after `run_batch` from one file to the end of another.

    Failed lines are named on standard error, where a terminal has a progress bar too.

    Args:
      done: what `resume(target)` gave.
    """
    with source.open("rb") as lines, target.open("ab") as out:
        total = sum(1 for _ in pieces(lines))
        lines.seek(0)
        with tqdm(total=total, unit="line", disable=None) as bar:

            def write(record: dict[str, Any]) -> None:
                out.write(encode(record))
                out.flush()
                if record["error"] is not None:
                    message = f"line {record['error']['line']}: {record['error']['message']}"
                    tqdm.write(message, file=sys.stderr)

            def show(summary: Summary) -> None:
                bar.update(summary.lines - bar.n)
                speed = f"{summary.tokens_per_second:.0f}"
                length = f"{summary.accept_length:.2f}"
                bar.set_postfix({"tok/s": speed, "accept length": length}, refresh=False)

            return run_batch(service, pieces(lines), write, done=done, on_progress=show)


def settings_for(names: tuple[str, ...], slots: int, defaults: dict[str, Any]) -> ServerSettings:
    """Returns the settings of a service for batches: what is under way always has room to wait.

    Args:
      names: of the model, as bodies may have them.
      slots: of its engine.
      defaults: sampling parameters of lines that bring none.
    """
    settings = ServerSettings(served_names=names, defaults=defaults)
    return replace(settings, max_waiting=_PLACES * slots * settings.max_sequences)


def seed_of(seed: int, custom_id: str) -> int:
    """Returns the seed of a line that brings none: 63 bits of the engine's and its custom_id."""
    text = f"{seed} {custom_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
