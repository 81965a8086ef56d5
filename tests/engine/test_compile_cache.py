"""Compiled programs are kept where the option says, and JAX's own setting comes first."""

import os
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from k26jax.engine.compile_cache import default_folder, keep_compiled_programs

PROGRAM = """
import sys, jax, jax.numpy as jnp
if sys.argv[2:]:
    jax.jit(lambda x: x - 1)(jnp.ones(3))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from k26jax.engine.compile_cache import keep_compiled_programs
keep_compiled_programs(sys.argv[1])
jax.jit(lambda x: jnp.sin(x) + 1)(jnp.ones(3)).block_until_ready()
print(jax.config.jax_compilation_cache_dir)
"""


def run(*arguments, **environment):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True)


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


def test_a_folder_that_cannot_be_written_costs_one_line_and_no_run(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    done = run(str(tmp_path / "file" / "cache"))
    assert done.stdout == "None\n"
    assert done.stderr.count("Warning") == 1
    assert "compile_cache_dir = " in done.stderr
    assert "Not a directory" in done.stderr


@pytest.fixture
def jax_setting():
    """A function that reads JAX's folder; the setting is none before and restored after."""
    name = "jax_compilation_cache_dir"
    before = getattr(jax.config, name)
    jax.config.update(name, None)
    yield lambda: getattr(jax.config, name)
    jax.config.update(name, before)
    compilation_cache.reset_cache()


def test_the_newest_engine_chooses_the_folder(tmp_path, jax_setting):
    """Bug: the folder of an earlier engine was taken for the user's own and stayed."""
    for name in ("one", "two", "two", "one"):
        keep_compiled_programs(str(tmp_path / name))
        assert jax_setting() == str(tmp_path / name)
    keep_compiled_programs("none")
    assert jax_setting() is None
    keep_compiled_programs(str(tmp_path / "two"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    for directory in (str(tmp_path / "one"), "none", "auto"):
        keep_compiled_programs(directory)
        assert jax_setting() == str(tmp_path / "own")


def test_a_folder_that_cannot_be_used_ends_the_earlier_one_too(tmp_path, jax_setting, monkeypatch):
    (tmp_path / "file").touch()
    keep_compiled_programs(str(tmp_path / "good"))
    for directory in (str(tmp_path / "file"), "~nobody-of-this-name/cache"):
        with pytest.warns(UserWarning, match="compile_cache_dir = .*give a folder.*or 'none'"):
            keep_compiled_programs(directory)
        assert jax_setting() is None
    monkeypatch.chdir(tmp_path)
    keep_compiled_programs("here")
    assert jax_setting() == str(tmp_path / "here")
    assert not any((tmp_path / "here").iterdir())


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "k26jax" / "compiled"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == tmp_path / ".cache" / "k26jax" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == tmp_path / ".cache" / "k26jax" / "compiled"
