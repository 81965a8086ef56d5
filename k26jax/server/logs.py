"""The server's log: events with fields, as text or JSON; never a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import sys
import time

LOG = logging.getLogger("k26jax.server")
_MOST_A_SECOND = 20
_QUIET = ("refused",)


def event(name: str, level: int = logging.INFO, **fields: object) -> None:
    """Logs an event."""
    LOG.log(level, name, extra={"fields": fields})


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        # What a client chose, such as a path, begins no line of its own.
        shown = " ".join(
            f"{name}={str(value).encode('unicode_escape').decode()}"
            for name, value in fields.items()
            if value is not None
        )
        clock = self.formatTime(record, "%H:%M:%S")
        text = f"{clock} {record.levelname.lower()} {record.getMessage()} {shown}".rstrip()
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        found |= getattr(record, "fields", {})
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


class _Stderr(logging.Handler):
    """Writes to what is standard error at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            self.handleError(record)


class _Limit(logging.Filter):
    """Lets some refused requests a second through, and says how many it dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._count, self._dropped = 0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage() not in _QUIET:
            return True
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if self._count > _MOST_A_SECOND:
            self._dropped += 1
            return False
        if self._dropped:
            record.fields = getattr(record, "fields", {}) | {"dropped_before": self._dropped}
            self._dropped = 0
        return True


def set_up(form: str, level: str) -> None:
    """Sends the server's log and uvicorn's warnings to standard error.

    Args:
        form: "text" or "json".
        level: name of the lowest level that is shown.
    """
    handler = _Stderr()
    handler.setFormatter(_Json() if form == "json" else _Text())
    handler.addFilter(_Limit())
    for logger, lowest in ((LOG, level.upper()), (logging.getLogger("uvicorn"), "WARNING")):
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(lowest)
