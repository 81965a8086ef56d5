"""A server's life: a port, the model while the port tells how far it is, requests, the end."""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from k26jax.errors import NotServingError, RequestError
from k26jax.llm import LLM
from k26jax.server import logs
from k26jax.server.app import create_app
from k26jax.server.service import Service

_REPORT_SECONDS = 10.0
_CLOSE_SECONDS = 5.0


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 takes any that is free.

    Raises: PortError if the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(2048)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise PortError(
            f"{host}:{port} cannot be listened on ({reason}); choose another --port, or 0 for any "
            "that is free"
        ) from error
    return sock


class PortError(RequestError):
    """The port cannot be had, for instance because another server has it."""

    exit_code = 1


def url_of(sock: socket.socket) -> str:
    """Returns the address of a socket as a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class WebThread:
    """uvicorn in a thread of its own; signals and the model's start stay in the main one."""

    def __init__(self, service: Service, sock: socket.socket):
        config = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(_CLOSE_SECONDS),
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._sock = sock
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [sock]}, name="k26jax-web", daemon=True
        )

    def start(self) -> None:
        """Begins to answer.

        Raises: NotServingError if it does not within some seconds.
        """
        self._thread.start()
        until = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise NotServingError("the web server did not start; see its log")
            time.sleep(0.01)

    @property
    def is_alive(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Sends what is being sent, closes the port and ends the thread."""
        self._server.should_exit = True
        self._thread.join(_CLOSE_SECONDS + 5)
        self._sock.close()


class Signals:
    """SIGTERM and Ctrl-C: before the model is ready they interrupt, then the first one drains."""

    def __init__(self) -> None:
        self._is_ready = False
        self._count = 0
        self._before: dict[int, object] = {}
        self._read, self._write = socket.socketpair()

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._read.close()
        self._write.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._write.send(b"!")  # wakes `wait`; an event's lock could be held here
        if not self._is_ready or self._count > 1:
            raise KeyboardInterrupt

    def wait(self, tick: Callable[[], bool]) -> None:
        """Waits for a signal, or until `tick`, called a few times a second, says no."""
        self._is_ready = True
        while not self._count and tick():
            select.select([self._read], [], [], 0.2)


def serve(service: Service, sock: socket.socket, load: Callable[[], LLM], *, grace: float) -> int:
    """Returns the exit code of a server: 0 after a signal, 1 if the engine failed.

    Args:
        load: gives the model; meanwhile /ready tells the service's stage.
        grace: seconds that running requests have to end after a signal; a second one ends them
            at once.
    """
    web = WebThread(service, sock)
    with Signals() as signals:
        try:
            web.start()
            llm = load()
            with llm:
                try:
                    service.open(llm)
                    service.warn_without_chat()
                    signals.wait(_Reporter(service, web).tick)
                    is_well = web.is_alive
                    logs.event("draining", running=service.scheduler.running, seconds=grace)
                    is_done = service.drain(grace)
                finally:
                    service.drain(0)
                is_well = is_well and service.scheduler.error is None
        finally:
            web.stop()
    # The last answers were on their way until the web thread ended.
    logs.event("stopped", all_answered=is_done)
    return 0 if is_well else 1


class _Reporter:
    """Says now and then what goes on, while something does, and once that the engine failed."""

    def __init__(self, service: Service, web: WebThread):
        self._service, self._web = service, web
        self._said, self._tokens, self._told = time.monotonic(), 0, False

    def tick(self) -> bool:
        """Returns whether the server goes on."""
        scheduler, now = self._service.scheduler, time.monotonic()
        if scheduler.error is not None and not self._told:
            self._told = True
            fields = {"hint": "running requests got an error; /health is 503; restart the server"}
            logs.LOG.error("engine_failed", exc_info=scheduler.error, extra={"fields": fields})
        if now - self._said >= _REPORT_SECONDS:
            tokens = self._service.metrics.tokens
            if tokens != self._tokens or scheduler.running:
                speed = (tokens - self._tokens) / (now - self._said)
                logs.event(
                    "busy",
                    running=scheduler.running,
                    waiting=scheduler.waiting,
                    tokens_per_second=round(speed, 1),
                )
            self._said, self._tokens = now, tokens
        return self._web.is_alive
