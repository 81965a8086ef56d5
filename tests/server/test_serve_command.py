"""`k26jax serve` as a process: start, signals, exit codes; and what it refuses before it loads."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from fixtures.paths import REPOSITORY
from scripted import ScriptedRunner, ids_of, prepared

from k26jax import LLM
from k26jax.cli import main
from k26jax.commands.serve import generation_defaults
from k26jax.engine.engine import Engine
from k26jax.errors import ConfigError
from k26jax.server import logs
from k26jax.server.run import PortError, bind, serve, url_of
from k26jax.server.service import Service
from k26jax.server.settings import ServerSettings

# Less to compile.
PLAIN = ("--speculative-algorithm", "NONE", "--grammar-backend", "none")
TARGET = REPOSITORY / "checkpoints" / "k26-tiny"


def refused(capsys, *flags: str, code: int = 2, model: str = str(TARGET)) -> str:
    """Returns the message of a start that is refused before any weight is read."""
    assert main(["serve", model, *flags]) == code
    said = capsys.readouterr().err
    assert "load target" not in said
    return said


def test_122_a_port_in_use_is_refused_before_the_weights_are_read(capsys):
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port} cannot be listened on" in refused(
            capsys, "--port", str(port), code=1
        )
        with pytest.raises(PortError, match="choose another --port"):
            bind("127.0.0.1", port)
    with pytest.raises(PortError):
        bind("no.such.host.invalid", 0)


class Bound:
    """A socket as far as `url_of` looks."""

    def __init__(self, *address):
        self.getsockname = lambda: address


def test_an_address_of_ipv6_stands_in_brackets():
    assert url_of(Bound("::1", 30000, 0, 0)) == "http://[::1]:30000"
    assert url_of(Bound("127.0.0.1", 30000)) == "http://127.0.0.1:30000"
    if machine_has_ipv6():
        with bind("::1", 0) as sock:
            assert re.fullmatch(r"http://\[::1\]:\d+", url_of(sock))


def machine_has_ipv6() -> bool:
    """Asked of the system, not of the code under test."""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_flags_that_cannot_be(capsys, tmp_path):
    assert "0 to 65535" in refused(capsys, "--port", "70000")
    assert "given twice" in refused(capsys, "--model-path", "elsewhere")
    assert "max_waiting = 0" in refused(capsys, "--max-waiting", "0")
    assert "stall_seconds = nan" in refused(capsys, "--stall-seconds", "nan")
    for seconds in ("nan", "-1"):
        assert "0 or more" in refused(capsys, "--grace-seconds", seconds)
    assert "API key is empty" in refused(capsys, "--api-key", "")
    assert "served_names" in refused(capsys, "--served-model-name", "")
    keys = tmp_path / "keys"
    assert "--api-key-file" in refused(capsys, "--api-key-file", str(keys))
    keys.write_text("\n")
    assert "holds no key" in refused(capsys, "--api-key-file", str(keys))
    assert "did you mean '--api-key'" in refused(capsys, "--api-kee", "x")
    assert "config.json" in refused(capsys, code=3, model=str(tmp_path))


def test_a_missing_package_is_one_clear_error(capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name)
    )
    said = refused(capsys, code=3)
    assert "the server needs uvicorn; install with: pip install 'k26jax[server]'" in said


def test_the_command_line_loads_no_web_framework():
    code = "import sys, k26jax.cli as c; c.build_parser(); print('fastapi' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


def test_sampling_defaults_of_a_folder(tmp_path):
    path = tmp_path / "generation_config.json"
    assert generation_defaults(tmp_path) == {}
    path.write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": null, "eos_token_id": 3}')
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.95}
    path.write_text('{"temperature": 0.6, "do_sample": false}')
    assert generation_defaults(tmp_path) == {"temperature": 0.0}
    for bad in ("[]", "{", '{"top_p": 7}'):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="generation_config"):
            generation_defaults(tmp_path)


class Process:
    """A server in a process of its own, from its first line to its end."""

    def __init__(self, flags: list[str]):
        command = [sys.executable, "-m", "k26jax", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"ready in .* on (http://\S+)", line):
                self.url = match[1]
                break
        else:
            raise AssertionError("".join(self.lines))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.process.stderr as stream:
            self.lines += list(stream)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(30)
        self._reader.join(10)
        return code, "".join(self.lines)


def test_142_a_process_starts_serves_and_drains_on_sigterm(small_pair):
    secret = "do-not-show"
    server = Process([*small_pair.flags, *PLAIN, "--api-key", secret, "--log-format", "json"])
    try:
        headers = {"authorization": f"Bearer {secret}"}
        # Eight rounds of two slots: long after the signal.
        body = {"prompt": small_pair.letters[:5], "max_tokens": 50, "stream": True, "n": 16,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as http:
            assert http.get("/health").status_code == 200
            with http.stream("POST", "/v1/completions", json=body, timeout=30) as answer:
                lines = answer.iter_lines()
                first = next(line for line in lines if line.startswith("data: "))
                server.process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        ends = [json.loads(line.removeprefix("data: "))["choices"][0] for line in rest[:-1]]
        assert [end["finish_reason"] for end in ends if end["finish_reason"]] == ["length"] * 16
        assert json.loads(first.removeprefix("data: "))["choices"][0]["finish_reason"] is None
        code, said = server.end()
    finally:
        server.process.kill()
    assert code == 0, said
    assert secret not in said
    assert small_pair.letters[:5] not in said
    events = [json.loads(line)["event"] for line in said.splitlines() if line.startswith("{")]
    assert [event for event in events if event in ("draining", "stopped", "answered")] == [
        "draining",
        "answered",
        "stopped",
    ]
    assert "engine: model_path" in said
    assert "max_running_requests = 2" in said
    host, _, port = server.url.removeprefix("http://").partition(":")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), timeout=5)


@pytest.mark.parametrize("fails", [False, True])
def test_the_exit_code_says_whether_the_engine_failed(fails, capsys):
    runner = ScriptedRunner(2, lambda request: [[token] for token in ids_of("one two three")])
    runner.error = ValueError("the device is on fire") if fails else None
    before = signal.getsignal(signal.SIGTERM)
    sock, found = bind("127.0.0.1", 0), []

    def client():
        with httpx.Client(base_url=url_of(sock), trust_env=False) as http:
            while http.get("/ready").status_code != 200:
                time.sleep(0.02)
            answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
            found.append((answer.status_code, http.get("/health").status_code))
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    logs.set_up("text", "info")
    thread = threading.Thread(target=client)
    thread.start()
    service = Service(ServerSettings(served_names=("tiny",)))
    llm = LLM.from_engine(Engine(prepared(2, 512), runner))
    code = serve(service, sock, lambda: llm, grace=5)
    thread.join(10)
    assert found == [(500, 503) if fails else (200, 200)]
    assert code == int(fails)
    said = capsys.readouterr().err
    assert ("the device is on fire" in said) == fails
    assert "stopped" in said
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_123_a_second_ctrl_c_ends_it_at_once(small_pair):
    server = Process([*small_pair.flags, *PLAIN])
    try:
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
        code, said = server.end()
    finally:
        server.process.kill()
    assert code in (0, 130), said
    assert "Traceback" not in said
