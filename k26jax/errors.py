"""Every error a user can cause, one class a kind, each with the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class K26Error(Exception):
    """Base of all errors raised for bad input; the message names the thing and the fix."""

    exit_code = 1


class ConfigError(K26Error):
    """A configuration file or option describes something this engine cannot run."""

    exit_code = 3


class CheckpointError(K26Error):
    """A checkpoint folder is damaged, incomplete or does not match its configuration."""

    exit_code = 3


class TokenizerError(K26Error):
    """A tokenizer file is missing, damaged or does not match the model's vocabulary."""

    exit_code = 3


class RequestError(K26Error):
    """One prompt or its sampling parameters cannot be served; other requests are unaffected."""

    exit_code = 2


class ContextLengthError(RequestError):
    """A prompt, or a prompt and the tokens asked for, do not fit in the context."""


class QueueFullError(RequestError):
    """As many requests wait for a slot as may wait; try again later."""


class NotServingError(K26Error):
    """The engine takes no requests now: it starts, drains, has ended or has failed."""

    exit_code = 1


class EngineFailedError(NotServingError):
    """The engine's loop ended with an error; what ran and waited ended with it."""


class BusyError(K26Error):
    """What was asked for can be done while nothing runs alone."""

    exit_code = 1


class CapacityError(K26Error):
    """The model, its cache, a request or a folder does not fit in the memory, context or disk."""

    exit_code = 4


class MeshError(K26Error):
    """The devices asked for are not there, or they cannot share the model evenly."""

    exit_code = 3


class ClusterError(K26Error):
    """Processes of one run could not meet, or one of them died or hangs."""

    exit_code = 1


class KernelError(K26Error):
    """A kernel was asked for by name and cannot run here; named kernels never fall back."""

    exit_code = 1


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
