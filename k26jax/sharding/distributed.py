"""Several processes as one run: how they meet, hear calls from process 0, and notice a lost one.

`jax.distributed` joins the devices; its key-value store, on process 0, carries everything here, so
one port is all that is needed. Messages are JSON and hold token ids and settings only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax

from k26jax.errors import ClusterError

_CALLS, _WATCH, _AGREE = "k26jax/call/", "k26jax/watch/", "k26jax/agree/"
_FAILED = _WATCH + "failed"
_KEPT_CALLS = 10_000
_GRACE = 10  # seconds beyond the timeout in which the fault must have been found
_joined: Cluster | None = None


def join_cluster(
    address: str | None, num_processes: int | None, process_id: int | None, *, timeout: int
) -> Cluster | None:
    """Returns this process's place among all that run one model; None without an address.

    Must come before JAX is asked for devices. A process joins once and stays.

    Args:
      address: host:port of process 0; "auto": what the cluster's launcher says.
      timeout: seconds to wait for the others now, and for a sign of life later.

    Raises: ClusterError if the processes do not meet in time.
    """
    global _joined
    if address is None:
        return None
    if _joined is not None:
        return _joined
    given = {} if address == "auto" else {"coordinator_address": address}
    if num_processes is not None:
        given |= {"num_processes": num_processes, "process_id": process_id}
    try:
        with _ends_after(timeout, address, num_processes, process_id):
            jax.distributed.initialize(
                **given,  # pyright: ignore[reportArgumentType]
                # JAX ends the process with a stack trace; it must not be the first to find out.
                initialization_timeout=timeout + _GRACE,
                # The watchdog is to speak first: it can say who is missing and what was going on.
                heartbeat_timeout_seconds=max(3 * timeout, 30),
                shutdown_timeout_seconds=timeout,
            )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if address == "auto" and "should be defined" in reason:
            raise ClusterError(
                "coordinator_address = 'auto' finds no launcher (Slurm, Open MPI, Kubernetes); "
                "start the processes with one, or give host:port, num_processes and process_id"
            ) from error
        raise ClusterError(
            f"{_who(process_id, num_processes)} cannot join the others at {address}: {reason}"
        ) from error
    client = _client()
    _joined = Cluster(client, jax.process_index(), jax.process_count(), timeout)
    atexit.register(_joined.leave)
    _joined.start()
    return _joined


@contextlib.contextmanager
def _ends_after(
    timeout: int, address: str, num_processes: int | None, process_id: int | None
) -> Iterator[None]:
    """Ends the process if the block, which cannot be interrupted, takes longer than this."""

    def end() -> None:
        who = _who(process_id, num_processes)
        silent = "" if not process_id or _answers(address) else f": nothing answers at {address}"
        print(
            f"k26jax: {who} did not meet the others at {address} within {timeout} s{silent}; start "
            "all of them, with the address of a host that all can reach",
            file=sys.stderr,
            flush=True,
        )
        os._exit(ClusterError.exit_code)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _who(process_id: int | None, num_processes: int | None) -> str:
    return "this process" if process_id is None else f"process {process_id} of {num_processes}"


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def _client() -> Any:
    # JAX has no public name for the store that it keeps for its own use.
    from jax._src import distributed

    return distributed.global_state.client


@dataclass
class _Seen:
    """What the watchdog last heard of a process, and when by its own clock."""

    beat: dict[str, Any]
    since: float


class Cluster:
    """This process among the processes of a run.

    Every process beats: once in a while it says that it lives and which call it is at. One that is
    silent for `timeout` seconds, or has not begun a call that others have been in for as long, ends
    all of them with an error that names it.
    """

    def __init__(self, client: Any, process_id: int, num_processes: int, timeout: float):
        self.process_id = process_id
        self.num_processes = num_processes
        self.timeout = timeout
        self._client = client
        self._calls = 0
        self._in_call: tuple[str, float] | None = None
        self._beat = 0
        self._seen: dict[int, _Seen] = {}
        self._verdict: str | None = None
        self._is_over = threading.Event()
        self._main_waits = threading.Event()

    @property
    def leads(self) -> bool:
        """Whether this process takes the requests; the others do what it tells them."""
        return self.process_id == 0

    def start(self) -> None:
        """Begins to beat and to watch the others."""
        unheard = {"beat": 0, "calls": 0, "where": "not heard of yet"}
        now = time.monotonic()
        self._seen = {number: _Seen(unheard, now) for number in range(self.num_processes)}
        threading.Thread(target=self._watch, name="k26jax-watchdog", daemon=True).start()

    def agree(self, what: str, value: Mapping[str, Any]) -> None:
        """Raises ClusterError unless all processes hold the same value; names what differs.

        Waits for all of them, and so holds them together.
        """
        mine = json.dumps(value, sort_keys=True)
        self._client.key_value_set(f"{_AGREE}{what}/{self.process_id}", mine)
        for number in range(self.num_processes):
            theirs = json.loads(self._wait_for(f"{_AGREE}{what}/{number}"))
            for name in sorted(value.keys() | theirs.keys()):
                if value.get(name) != theirs.get(name):
                    raise ClusterError(
                        f"{what} differ: {name} is {value.get(name)!r} in process "
                        f"{self.process_id} and {theirs.get(name)!r} in process {number}; start "
                        "all processes with the same ones"
                    )

    @contextlib.contextmanager
    def call(self, name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Tells the others to make a call; the block is this process's own part of it.

        An interrupt waits for the end of the block, as the others would wait for a part that was
        told and never began; a second one does not wait.
        """
        message = json.dumps({"name": name, "arguments": arguments})
        with _interrupts_wait():
            self._calls += 1
            self._client.key_value_set(f"{_CALLS}{self._calls}", message)
            if self._calls > _KEPT_CALLS:
                # A process that far behind would have been missed long ago.
                self._client.key_value_delete(f"{_CALLS}{self._calls - _KEPT_CALLS}")
            with self.working(name):
                yield

    def hear(self) -> tuple[str, dict[str, Any]]:
        """Returns name and arguments of the next call that process 0 makes, however long it takes.

        Raises: ClusterError if a process of the run is lost.
        """
        message = json.loads(self._wait_for(f"{_CALLS}{self._calls + 1}"))
        self._calls += 1
        return message["name"], message["arguments"]

    def leave(self) -> None:
        """Ends the watch; in process 0 this ends the others too, unless they ended before."""
        if self._verdict is not None:
            sys.stderr.flush()
            # JAX would wait for processes that are no more.
            os._exit(ClusterError.exit_code)
        self._is_over.set()

    @contextlib.contextmanager
    def working(self, name: str) -> Iterator[None]:
        """Marks the block as this process's part of the newest call.

        Raises: ClusterError in place of what a device says that lost the others.
        """
        self._in_call = name, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            # A transport that lost its peer says so at once, and does not know whom.
            self._main_waits.set()
            if self._is_over.wait(self.timeout + _GRACE) and self._verdict:
                raise ClusterError(self._verdict) from error
            raise
        finally:
            self._in_call = None

    def _wait_for(self, key: str) -> str:
        """Returns the text under a key once it is there; the watchdog ends a wait in vain."""
        while True:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                return self._client.blocking_key_value_get(key, 1000)
            if self._verdict is not None:
                raise ClusterError(self._verdict)

    def _watch(self) -> None:
        pause = min(1.0, self.timeout / 5)
        while not self._is_over.wait(pause):
            try:
                self._say_alive()
                beats = dict(self._client.key_value_dir_get(_WATCH))
            except jax.errors.JaxRuntimeError as error:
                verdict = (
                    "process 0, which leads, cannot be reached any more: "
                    f"{str(error).splitlines()[0]}"
                )
                return self._end(verdict)
            told = beats.pop(_FAILED, None)
            verdict = told or self._judge(beats)
            if verdict:
                if told is None:
                    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was first
                        self._client.key_value_set(_FAILED, verdict)
                if self.leads:
                    # The store ends with this process: the others read the verdict first.
                    time.sleep(3 * pause)
                return self._end(verdict)

    def _say_alive(self) -> None:
        self._beat += 1
        beat = {
            "beat": self._beat,
            "calls": self._calls,
            "where": f"pid {os.getpid()} on {socket.gethostname()}",
        }
        key = f"{_WATCH}{self.process_id}"
        self._client.key_value_set(key, json.dumps(beat), allow_overwrite=True)

    def _judge(self, beats: dict[str, str]) -> str | None:
        """Returns who is lost, if anybody is."""
        now = time.monotonic()
        for key, text in beats.items():
            number, beat = int(key.rpartition("/")[2]), json.loads(text)
            if self._seen[number].beat["beat"] != beat["beat"]:
                self._seen[number] = _Seen(beat, now)
        for number, seen in self._seen.items():
            if number != self.process_id and now - seen.since > self.timeout:
                return (
                    f"process {number} ({seen.beat['where']}) has been silent for {self.timeout} "
                    "s: it died, was stopped or cannot be reached"
                )
        in_call = self._in_call
        if in_call is None or now - in_call[1] < self.timeout or in_call[0] in UNTIMED:
            return None
        name, began = in_call
        late = [n for n, seen in self._seen.items() if seen.beat["calls"] < self._calls]
        what = f"call {self._calls} ({name}), which has run for {now - began:.0f} s"
        if late:
            who = ", ".join(f"process {n} ({self._seen[n].beat['where']})" for n in sorted(late))
            return f"{who} has not begun {what}: it hangs"
        if self.leads:
            return f"the devices do not end {what}, though all processes have begun it"
        return None

    def _end(self, verdict: str) -> None:
        """Ends the process: its main thread may be waiting for a device that never answers."""
        self._verdict = verdict
        self._is_over.set()
        if self._main_waits.wait(2):
            return
        print(f"k26jax: {verdict}", file=sys.stderr, flush=True)
        os._exit(ClusterError.exit_code)


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Holds the first Ctrl-C back until the block has ended; other threads never get one."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            handler(number, frame)
        caught.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        handler(*caught[0])


# Calls that compile, which may take minutes and differs from host to host.
UNTIMED = ("warm_up_traces", "warm_up_extras", "warm_up_guided", "logits")
