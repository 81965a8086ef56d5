"""`k26jax doctor`: a sound model, every kind of damage with what to do, and the exit codes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import warnings
from pathlib import Path

import jax
import pytest

from k26jax.cli import main
from k26jax.commands import doctor_checks, serve
from k26jax.engine import memory


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("K26JAX_"):
            monkeypatch.delenv(name)


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def pair(small_pair, tmp_path):
    """Copies of the small pair's folders, to be damaged, and flags that name them."""
    flags = list(small_pair.flags)
    for name in ("target", "drafter"):
        folder = getattr(small_pair, name)
        shutil.copytree(folder, tmp_path / name)
        flags[flags.index(str(folder))] = str(tmp_path / name)
    return flags


def checked(capsys, port: int, *flags: str, code: int = 0) -> dict[str, dict]:
    """The checks by name."""
    assert main(["doctor", "--port", str(port), "--json", *flags]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    for check in found["checks"]:
        assert (check["fix"] is None) == (check["status"] == "ok"), check
    return {check["name"]: check for check in found["checks"]}


def statuses(found: dict[str, dict], status: str) -> list[str]:
    return [name for name, check in found.items() if check["status"] == status]


def test_a_machine_without_a_model(capsys, port):
    found = checked(capsys, port)
    assert list(found) == ["versions", "server", "port", "devices", "compile cache", "model"]
    assert statuses(found, "fail") == []
    assert f"jax {jax.__version__}" in found["versions"]["text"]
    assert found["devices"]["text"].startswith(f"{jax.device_count()} x cpu (cpu)")
    assert "k26jax/compiled: " in found["compile cache"]["text"]


def test_a_sound_pair_without_chats(pair, capsys, port):
    """Its tokenizer has letters alone: other texts are lost, and the format of chats needs more."""
    found = checked(capsys, port, *pair)
    assert statuses(found, "fail") == []
    assert statuses(found, "warn") == ["tokenizer", "chat template"]
    assert "comes back as" in found["tokenizer"]["text"]
    assert "no chats: " in found["chat template"]["text"]
    assert found["engine"]["text"] == "DDTREE, float32, reference"
    assert "for 2 x 64 tokens" in found["memory"]["text"]
    assert "layers" in found["drafter"]["text"]


def test_the_trained_model_as_lines_of_text(capsys, port):
    folder = Path(__file__).parent.parent / "checkpoints" / "k26-tiny"
    assert main(["doctor", str(folder), "--port", str(port)]) == 0
    out, err = capsys.readouterr()
    assert "checks: 0 failed, 0 warnings" in err
    assert [line.split()[0] for line in out.splitlines()] == ["ok"] * len(out.splitlines())
    assert "4096 ids, a text comes back the same" in out
    assert "the built-in one, with tools" in out
    assert "4 files, 18.6 MB, 6 layers, kimi_k2" in out


def remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


DAMAGE = {
    "config.json": (lambda t, d: remove(t, "config.json"), "files", "fail", 3, "does not exist"),
    "weights": (
        lambda t, d: [path.unlink() for path in t.glob("*.safetensors")],
        "files", "fail", 3, "safetensors",
    ),
    "cut": (
        lambda t, d: [os.truncate(path, 5000) for path in t.glob("*.safetensors")],
        "files", "fail", 3, "bytes",
    ),
    "tokenizer": (lambda t, d: remove(t, "tokenizer.json"), "tokenizer", "warn", 0, "none, so"),
    "tokenizer's text": (
        lambda t, d: write(t, "tokenizer.json", "{"), "tokenizer", "fail", 3, "tokenizer.json"
    ),
    "template": (
        lambda t, d: write(t, "chat_template.jinja", "{% if %}"),
        "chat template", "warn", 0, "no chats",
    ),
    "sampling": (
        lambda t, d: write(t, "generation_config.json", '{"top_p": 7}'),
        "sampling", "fail", 3, "top_p = 7",
    ),
    "drafter": (lambda t, d: remove(d, "config.json"), "drafter", "fail", 3, "does not exist"),
    "drafter's weights": (
        lambda t, d: [path.unlink() for path in d.glob("*.safetensors")],
        "drafter", "fail", 3, "safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_with_what_to_do(what, pair, capsys, port, tmp_path):
    damage, name, status, code, words = DAMAGE[what]
    damage(tmp_path / "target", tmp_path / "drafter")
    check = checked(capsys, port, *pair, code=code)[name]
    assert (check["status"], check["exit_code"]) == (status, code)
    assert words in check["text"]


def test_a_drafter_of_another_model(pair, capsys, port, tmp_path):
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 8}))
    check = checked(capsys, port, *pair, code=3)["drafter"]
    assert str(config["vocab_size"] + 8) in check["text"]


def test_what_does_not_fit(pair, capsys, port, monkeypatch):
    found = checked(capsys, port, *pair, "--context-length", "900m", code=4)
    assert "exceeds the model's" in found["memory"]["text"]
    assert found["memory"]["fix"].startswith("give at most ")
    found = checked(capsys, port, *pair, "--tp-size", "7", code=3)
    assert statuses(found, "fail") == ["memory"]
    need = checked(capsys, port, *pair)["memory"]["text"]
    monkeypatch.setattr(doctor_checks, "available_bytes", lambda devices: 10_000)
    check = checked(capsys, port, *pair)["memory"]
    assert check["status"] == "warn"
    assert check["text"].partition(", of ")[0] == need.partition(", of ")[0]
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 10_000)
    check = checked(capsys, port, *pair, code=4)["memory"]
    assert "of memory are needed" in check["text"]
    assert check["fix"] == "use a machine with more memory"


def test_a_port_that_is_taken(capsys, port):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        check = checked(capsys, port, code=1)["port"]
    assert f"127.0.0.1:{port} cannot be listened on" in check["text"]
    assert "--port" in check["fix"]
    assert main(["doctor", "--port", "70000"]) == 2


def test_a_compile_cache_that_cannot_be(capsys, port, tmp_path, pair):
    (tmp_path / "file").write_text("")
    bad = str(tmp_path / "file" / "sub")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checked(capsys, port, *pair, "--compile-cache-dir", bad)
    assert found["compile cache"]["status"] == "warn"
    assert bad in found["compile cache"]["text"]
    found = checked(capsys, port, *pair, "--compile-cache-dir", "none")
    assert "compiles everything" in found["compile cache"]["text"]


def test_missing_packages_and_devices(capsys, port, monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)

    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'\nmore")

    monkeypatch.setattr(doctor_checks.jax, "devices", devices)
    found = checked(capsys, port, code=1)
    assert found["server"]["fix"] == "install with: pip install 'k26jax[server]'"
    assert statuses(found, "warn") == ["server", "port"]
    assert found["devices"]["text"].endswith("Unable to initialize backend 'cuda'")
    assert "JAX_PLATFORMS=cpu" in found["devices"]["fix"]
