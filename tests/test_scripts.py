"""The shell scripts install when there is something to install, and otherwise start at once."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from fixtures.paths import REPOSITORY

# Stands for the environment's programs: notes what pip was asked for; fails as without network.
PYTHON = """#!/bin/sh
case "$*" in
  *pip*) echo "$*" >> pip.log; [ ! -e offline ] ;;
  *) echo "ran $*" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a stand-in for .venv; `run` returns what a script asked pip for."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("setup.sh", "demo.sh", "test.sh"):
        shutil.copy(REPOSITORY / "scripts" / name, scripts)
    (tmp_path / "pyproject.toml").touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "k26jax"):
        (programs / name).write_text(PYTHON)
        (programs / name).chmod(0o755)
    return tmp_path


def run(checkout, script, code=0, path=os.environ["PATH"]) -> list[str]:
    log = checkout / "pip.log"
    log.unlink(missing_ok=True)
    command = ["sh", str(checkout / "scripts" / script)]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=checkout.parent, env=environment
    )
    assert done.returncode == code, done.stderr
    assert ("ran" in done.stdout) == (code == 0)
    return [line.split()[-1] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize(("script", "asked"), [("demo.sh", "."), ("test.sh", ".[dev]")])
def test_the_second_start_installs_nothing(checkout, script, asked):
    assert run(checkout, script) == [asked]
    (checkout / "offline").touch()
    assert run(checkout, script) == []
    later = (checkout / ".venv" / "installed").stat().st_mtime + 5
    os.utime(checkout / "pyproject.toml", (later, later))
    assert run(checkout, script, code=1) == [asked]
    (checkout / "offline").unlink()
    assert run(checkout, script) == [asked]


def test_an_installation_that_failed_is_tried_again(checkout):
    (checkout / "offline").touch()
    assert run(checkout, "demo.sh", code=1) == ["."]
    (checkout / "offline").unlink()
    assert run(checkout, "demo.sh") == ["."]


def test_the_tests_environment_serves_the_demo_and_not_the_other_way_round(checkout):
    assert run(checkout, "test.sh") == [".[dev]"]
    assert run(checkout, "demo.sh") == []


def test_the_demos_environment_does_not_serve_the_tests(checkout):
    assert run(checkout, "demo.sh") == ["."]
    assert run(checkout, "test.sh") == [".[dev]"]


def test_an_environment_made_anew_is_filled_anew(checkout):
    """As after the Python that it was made with was replaced."""
    assert run(checkout, "demo.sh") == ["."]
    python = checkout / ".venv" / "bin" / "python"
    text = python.read_text()
    python.unlink()
    maker = checkout / "python3"
    maker.write_text(f"#!/bin/sh\ncat > {python} <<'END'\n{text}END\nchmod +x {python}\n")
    maker.chmod(0o755)
    path = f"{checkout}:{os.environ['PATH']}"
    assert run(checkout, "demo.sh", path=path) == ["."]
    assert run(checkout, "demo.sh") == []
