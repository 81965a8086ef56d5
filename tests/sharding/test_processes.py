"""Runs of several processes that meet through jax.distributed, and what a lost one does to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fixtures.paths import REPOSITORY
from fixtures.small_pair import letter_ids, write_tokenizer
from folders import write_shared_pair

from k26jax.config import ModelConfig

WORKER = Path(__file__).parent / "process_worker.py"
TIMEOUT = 5  # seconds of silence that end a run here
ASKS = [
    {"prompt": [1, 2, 3, 11], "temperature": 0, "max_tokens": 16, "ignore_eos": True},
    {"prompt": list(range(2, 40)), "temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 12},
    # What it asks for besides is told as JSON, whose names are strings.
    {"prompt": [3], "temperature": 1.1, "seed": 4, "max_tokens": 12}
    | {"frequency_penalty": 0.5, "logit_bias": {"5": 2.0}, "logprobs": 1},
    {"prompt": [*range(2, 38), 5], "temperature": 0, "max_tokens": 12},
]


@pytest.fixture(scope="module")
def options(golden_dir, tmp_path_factory) -> dict:
    """Options of a pair in folders, with a cache of programs that all processes share."""
    folder = tmp_path_factory.mktemp("shared")
    return write_shared_pair(golden_dir, folder) | {"compile_cache_dir": str(folder / "compiled")}


def _environment(flags: str = "") -> dict[str, str]:
    """What a process is started with; its programs are compiled quickly and kept."""
    return os.environ | {
        "XLA_FLAGS": f"--xla_backend_optimization_level=0 {flags}",
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
    }


class Run:
    """The processes of a run, of two fake devices each."""

    def __init__(
        self,
        options: dict,
        count: int,
        asks: list,
        folder: Path,
        *,
        own: dict | None = None,
        **more,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        shared = (
            options
            | more
            | {
                "coordinator_address": address,
                "num_processes": count,
                "distributed_timeout": TIMEOUT,
            }
        )
        environment = _environment("--xla_force_host_platform_device_count=2")
        self.logs = [folder / f"process_{number}.log" for number in range(count)]
        self.processes = []
        for number, log in enumerate(self.logs):
            given = json.dumps(shared | {"process_id": number} | (own or {}).get(number, {}))
            with log.open("wb") as out:
                command = [sys.executable, WORKER, given, json.dumps(asks)]
                self.processes.append(
                    subprocess.Popen(command, stdout=out, stderr=out, env=environment)
                )

    def text(self, number: int) -> str:
        return self.logs[number].read_text()

    def wait_for(self, number: int, word: str, seconds: float = 200) -> None:
        """Waits until a process has printed a word."""
        end = time.monotonic() + seconds
        while word not in self.text(number):
            assert self.processes[number].poll() is None, self.text(number)
            assert time.monotonic() < end, self.text(number)
            time.sleep(0.1)

    def codes(self, seconds: float = 200) -> list[int]:
        """Waits for the end of all, and returns their exit codes."""
        end = time.monotonic() + seconds
        return [p.wait(timeout=max(end - time.monotonic(), 0.1)) for p in self.processes]

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture
def start(options, tmp_path):
    """Starts a run; whatever of it still lives at the end of the test is ended."""
    runs = []

    def start(count: int, asks: list, **more) -> Run:
        runs.append(Run(options, count, asks, tmp_path, **more))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def expected(options) -> dict:
    """What one process with one device gives."""
    command = [sys.executable, WORKER, json.dumps(options), json.dumps(ASKS)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _check_same(run: Run, expected: dict) -> None:
    assert run.codes() == [0] * len(run.processes), "\n".join(map(run.text, range(len(run.logs))))
    found = json.loads(run.text(0).splitlines()[-1])
    assert found["tokens"] == expected["tokens"]
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-4)
    assert all("followed" in run.text(number) for number in range(1, len(run.logs)))


def test_two_processes_give_the_tokens_of_one(start, expected):
    """Two devices each: all four share every layer, and without --tp-size that is the default.

    The last prompt takes two pages of the second one's in both processes, drafter's heads cut.
    """
    run = start(2, ASKS, enable_prefix_caching=True, prefix_cache_tokens=64)
    _check_same(run, expected)
    assert json.loads(run.text(0).splitlines()[-1])["cached"] == [0, 0, 0, 32]
    assert expected["cached"] == [0] * 4


@pytest.mark.slow
def test_two_processes_give_the_answers_of_a_shape_of_one(start, options):
    """Each process makes the masks itself; nothing of them travels."""
    config = ModelConfig.from_folder(Path(options["model_path"]))
    letters = letter_ids(config)
    write_tokenizer(Path(options["model_path"]), letters, config.eos_token_ids)
    half = "".join(letters)[::2]
    asks = [
        {**ASKS[0], "ignore_eos": False, "structured_outputs": {"regex": f"[{half}]{{9}}"}},
        {**ASKS[2], "structured_outputs": {"choice": [half[:4], half[3:9]]}},
        ASKS[1],
    ]
    command = [sys.executable, WORKER, json.dumps(options), json.dumps(asks)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=300)
    _check_same(start(2, asks), json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_four_processes_give_the_tokens_of_one(start, expected):
    _check_same(start(4, ASKS, ep_size=2), expected)


def test_a_killed_process_ends_the_others_with_an_error_that_names_it(start):
    run = start(2, [])
    run.wait_for(0, "again")
    run.processes[1].kill()
    killed = time.monotonic()
    codes = run.codes(seconds=60)
    assert time.monotonic() - killed < TIMEOUT + 15
    assert codes[0] == 1
    assert f"process 1 (pid {run.processes[1].pid} on {socket.gethostname()})" in run.text(0)
    assert f"silent for {TIMEOUT} s" in run.text(0)


@pytest.mark.slow
def test_a_stopped_process_ends_the_others_too(start):
    """It lives and its connections stand; only its beats are missing."""
    run = start(4, [])
    run.wait_for(0, "again")
    run.processes[2].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    for number in (0, 1, 3):
        assert run.processes[number].wait(timeout=60) != 0
        assert f"process 2 (pid {run.processes[2].pid}" in run.text(number), run.text(number)
    assert time.monotonic() - stopped < TIMEOUT + 15


@pytest.mark.slow
def test_without_process_0_the_others_end(start):
    """It holds the store, so that JAX itself may be the first to say so."""
    run = start(2, [])
    run.wait_for(0, "again")
    run.processes[0].kill()
    killed = time.monotonic()
    assert run.codes(seconds=60)[1] != 0
    assert time.monotonic() - killed < TIMEOUT + 15
    said = run.text(1)
    assert "process 0" in said or "leader task" in said or "coordination service" in said


@pytest.mark.slow
def test_options_that_differ_end_both(options, start):
    run = start(2, ASKS, own={1: {"speculative_ddtree_budget": 4}})
    assert run.codes() == [1, 1]
    assert "speculative_ddtree_budget is 5 in process 0 and 4 in process 1" in run.text(0)


@pytest.mark.slow
def test_a_process_that_never_comes(start):
    run = start(2, ASKS, own={1: {"model_path": "nowhere"}})
    codes = run.codes()
    assert codes[1] == 3
    assert codes[0] == 1
    assert "process 0 of 2 did not meet the others" in run.text(0)
    assert "stack trace" not in run.text(0)
