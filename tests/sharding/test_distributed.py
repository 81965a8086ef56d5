"""The watchdog's judgement and the messages, over a store that stands for JAX's."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from k26jax.errors import ClusterError
from k26jax.sharding.distributed import Cluster


class Store:
    """The part of the key-value store that is used, in one process."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.lock = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.lock:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.lock.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.lock:
            if not self.lock.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        with self.lock:
            return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]

    def key_value_delete(self, key: str) -> None:
        with self.lock:
            self.values.pop(key, None)


class Ended(Cluster):
    """A cluster whose watchdog notes the verdict where it would end the process."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ended = threading.Event()

    def _end(self, verdict: str) -> None:
        self._verdict = verdict
        self._is_over.set()
        self.ended.set()


@pytest.fixture
def pair():
    """Two processes of a run with a timeout of half a second, both watching."""
    store = Store()
    both = [Ended(store, number, 2, 0.5) for number in range(2)]
    for cluster in both:
        cluster.start()
    yield both
    for cluster in both:
        cluster._is_over.set()


def test_calls_arrive_in_order_with_their_arguments(pair):
    leader, follower = pair
    heard = []

    def follow():
        for _ in range(3):
            name, arguments = follower.hear()
            with follower.working(name):
                heard.append((name, arguments))

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(3):
        with leader.call("run", {"limit": number, "record_trees": False}):
            pass
    thread.join(10)
    assert heard == [("run", {"limit": n, "record_trees": False}) for n in range(3)]
    assert leader.leads
    assert not follower.leads


def test_idle_processes_are_left_in_peace(pair):
    time.sleep(1.5)
    assert not any(cluster.ended.is_set() for cluster in pair)


def test_a_silent_process_is_named_by_the_others(pair):
    leader, follower = pair
    time.sleep(0.4)
    follower._is_over.set()  # it says nothing from here on
    assert leader.ended.wait(10)
    assert leader._verdict.startswith("process 1 (pid ")
    assert "silent for 0.5 s" in leader._verdict


def test_a_process_that_does_not_begin_a_call_is_named_though_it_beats(pair):
    leader, follower = pair
    with leader.call("run", {}):
        assert leader.ended.wait(10)
    assert leader._verdict.startswith("process 1 (pid ")
    assert "has not begun call 1 (run)" in leader._verdict
    assert "it hangs" in leader._verdict
    # The others end with the same words.
    assert follower.ended.wait(10)
    assert follower._verdict == leader._verdict


def test_a_call_that_devices_do_not_end_ends_the_run(pair):
    leader, follower = pair
    with leader.call("run", {}):
        name, _ = follower.hear()
        with follower.working(name):
            assert leader.ended.wait(10)
    assert "the devices do not end call 1 (run)" in leader._verdict


def test_an_error_of_the_transport_becomes_the_verdict(pair):
    leader, follower = pair
    follower._is_over.set()
    with pytest.raises(ClusterError, match=r"process 1 .* silent"), leader.call("run", {}):
        raise RuntimeError("connection closed by peer")


def test_an_error_without_a_lost_process_stays_as_it_is():
    alone = Ended(Store(), 0, 1, 0.2)
    alone.timeout = -9.8  # the wait for a verdict is that and ten seconds
    with pytest.raises(RuntimeError, match="out of memory"), alone.call("run", {}):
        raise RuntimeError("out of memory")


def test_options_that_differ_are_named(pair):
    leader, follower = pair

    def disagree():
        with pytest.raises(ClusterError):
            follower.agree("options", {"tp_size": 2})

    other = threading.Thread(target=disagree)
    other.start()
    with pytest.raises(ClusterError) as error:
        leader.agree("options", {"tp_size": 4})
    other.join(10)
    assert str(error.value).startswith(
        "options differ: tp_size is 4 in process 0 and 2 in process 1"
    )


def test_a_store_that_is_gone_ends_the_process(pair):
    _, follower = pair

    def gone(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: no connection\nmore")

    follower._client = Store()
    follower._client.key_value_dir_get = gone
    assert follower.ended.wait(10)
    assert follower._verdict == (
        "process 0, which leads, cannot be reached any more: UNAVAILABLE: no connection"
    )


def test_beats_say_who_and_where(pair):
    time.sleep(0.3)
    beats = dict(pair[0]._client.key_value_dir_get("k26jax/watch/"))
    assert {key[-1] for key in beats} == {"0", "1"}
    assert set(json.loads(next(iter(beats.values())))) == {"beat", "calls", "where"}


@pytest.mark.parametrize(
    ("address", "mention"),
    [
        ("localhost:{port}", "process 1 of 2 did not meet the others .* nothing answers"),
        ("auto", "finds no launcher"),
    ],
)
def test_a_coordinator_that_is_not_there(address, mention):
    """JAX alone would end the process by a signal, with a stack trace."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        address = address.format(port=unused.getsockname()[1])
        numbers = (None, None) if address == "auto" else (2, 1)
        program = (
            "import sys\n"
            "from k26jax.errors import ClusterError\n"
            "from k26jax.sharding.distributed import join_cluster\n"
            "try:\n"
            f"    join_cluster({address!r}, *{numbers}, timeout=2)\n"
            "except ClusterError as error:\n"
            "    sys.exit(str(error))\n"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.search(mention, ended.stderr)
    assert "stack trace" not in ended.stderr


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupt_waits_for_the_call_that_the_others_were_told(count):
    """Told and not begun, it would leave them in a program that never ends."""
    cluster, ended = Cluster(Store(), 0, 1, timeout=5), []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), cluster.call("run", {}):  # noqa: PT012
        for _ in range(count):
            signal.raise_signal(signal.SIGINT)
        ended.append("run")
    assert ended == ["run"][: 2 - count]
    assert signal.getsignal(signal.SIGINT) is handler
