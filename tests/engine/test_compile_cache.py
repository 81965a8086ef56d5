"""Compiled programs are kept where the option says, and JAX's own setting comes first."""

import os
import subprocess
import sys

import pytest

from k26jax.engine.compile_cache import default_folder

PROGRAM = """
import sys, jax, jax.numpy as jnp
if sys.argv[2:]:
    jax.jit(lambda x: x - 1)(jnp.ones(3))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from k26jax.engine.compile_cache import keep_compiled_programs
keep_compiled_programs(sys.argv[1])
jax.jit(lambda x: jnp.sin(x) + 1)(jnp.ones(3)).block_until_ready()
"""


def run(*arguments, **environment):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments], env=environment, check=True)


@pytest.mark.parametrize("already_compiled", [False, True])
def test_programs_are_kept(tmp_path, already_compiled):
    run(str(tmp_path / "cache"), *["compile first"] * already_compiled)
    assert any(path.name.startswith("jit_") for path in (tmp_path / "cache").iterdir())


def test_jax_own_folder_stays(tmp_path):
    run(str(tmp_path / "ours"), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert any((tmp_path / "own").iterdir())
    assert not (tmp_path / "ours").exists()


def test_none_keeps_nothing(tmp_path):
    run("none", XDG_CACHE_HOME=str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_no_run(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    run(str(tmp_path / "file" / "cache"))


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "k26jax" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "k26jax" / "compiled"
