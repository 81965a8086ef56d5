"""Where compiled programs are kept from one start to the next."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

OFF = "none"
_SETTING = "jax_compilation_cache_dir"
_set_here: str | None = None


def keep_compiled_programs(directory: str) -> None:
    """Makes this process look for compiled programs in a folder, and keep new ones there.

    JAX has one folder a process, so the newest call holds; a folder that somebody else gave JAX
    (JAX_COMPILATION_CACHE_DIR) stays. A folder that cannot be used costs compilations and a
    warning, never the run.

    Args:
      directory: "auto": the user's cache folder; "none": nothing is kept.
    """
    global _set_here
    before = getattr(jax.config, _SETTING)
    if before is not None and before != _set_here:
        return
    _set_here = None if directory == OFF else _usable_folder(directory)
    if _set_here != before:
        jax.config.update(_SETTING, _set_here)
        # JAX settles whether it has a cache at its first compilation, which may be past.
        compilation_cache.reset_cache()


def folder_in_use() -> str | None:
    """Returns where this process keeps compiled programs; None: nowhere."""
    return getattr(jax.config, _SETTING)


def default_folder() -> Path:
    """Returns the folder of "auto": k26jax/compiled under the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one counts as none, by the rules of that variable.
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "k26jax" / "compiled"


def folder_of(directory: str) -> Path:
    """Returns the folder that a directory option means.

    Raises: RuntimeError without a home folder.
    """
    folder = default_folder() if directory == "auto" else Path(directory).expanduser()
    return folder.absolute()


def try_folder(directory: str) -> Path:
    """Returns the folder of an option, made and tried.

    Raises: OSError or RuntimeError if nothing can be kept there.
    """
    folder = folder_of(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return folder


def _usable_folder(directory: str) -> str | None:
    """Returns the folder, made and tried; None, with a warning, if nothing can be kept there."""
    try:
        folder = try_folder(directory)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        warnings.warn(
            f"compile_cache_dir = {directory!r} cannot be used ({error}), so compiled programs are "
            "not kept and the next start compiles again; give a folder that can be written, or "
            "'none'",
            stacklevel=2,
        )
        return None
    return str(folder)
