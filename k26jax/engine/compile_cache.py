"""Where compiled programs are kept from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

OFF = "none"
_SETTING = "jax_compilation_cache_dir"


def keep_compiled_programs(directory: str) -> None:
    """Makes this process look for compiled programs in a folder, and keep new ones there.

    A folder that JAX was already given (JAX_COMPILATION_CACHE_DIR) stays. A folder that cannot be
    written costs a compilation, never the run: JAX warns and compiles.

    Args:
      directory: "auto": the user's cache folder; "none": leave JAX as it is.
    """
    if directory == OFF or getattr(jax.config, _SETTING) is not None:
        return
    folder = default_folder() if directory == "auto" else Path(directory).expanduser()
    jax.config.update(_SETTING, str(folder))
    # JAX settles whether it has a cache at its first compilation, which may be past.
    compilation_cache.reset_cache()


def default_folder() -> Path:
    """Returns the folder of "auto": k26jax/compiled under the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "k26jax" / "compiled"
