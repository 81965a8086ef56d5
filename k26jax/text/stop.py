"""Stop strings in a growing text: finds them across pieces and never shows part of one."""

from __future__ import annotations

from collections.abc import Sequence

from k26jax.errors import RequestError

MAX_STOP_STRINGS = 16


class StopMatcher:
    """The part of a growing text that may be shown, up to the first stop string.

    First means: the match that starts earliest; of several that start there, the shortest, since
    it is complete first. The result is that of a search through the whole text, however the text
    was cut into pieces. So a finished match waits while a longer stop string that starts before
    it is still possible ("bc" after "a" when "abcd" is a stop string too).

    Args:
        stop: at most 16 strings that are not empty; none is allowed and lets everything through.
        include_stop: whether the shown text ends with the stop string instead of before it.

    Raises:
        RequestError: too many stop strings, or one that is empty, not a string or not Unicode.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False):
        self._stop = check_stop(stop)
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns (text that may now be shown, the stop string that was found or None).

        Holds back only what could still become a stop string. After a match every call returns
        no text and that match.
        """
        if self._matched is not None:
            return "", self._matched
        self._held += text
        found = self._search()
        limit = found[0] if found else len(self._held)
        hold = self._first_open(limit)
        if found and hold == limit:
            return self._finish(found)
        shown, self._held = self._held[:hold], self._held[hold:]
        return shown, None

    def flush(self) -> tuple[str, str | None]:
        """Returns the rest of the text, which has ended, and the stop string found in it."""
        if self._matched is not None:
            return "", self._matched
        found = self._search()
        if found:
            return self._finish(found)
        shown, self._held = self._held, ""
        return shown, None

    def _search(self) -> tuple[int, int, str] | None:
        """The earliest, then shortest, complete match in the held text: (start, length, string)."""
        starts = ((self._held.find(stop), len(stop), stop) for stop in self._stop)
        return min((match for match in starts if match[0] >= 0), default=None)

    def _first_open(self, limit: int) -> int:
        """The first position before `limit` from which all held text begins a stop string."""
        size = len(self._held)
        longest = max(map(len, self._stop), default=0)
        for start in range(max(0, size - longest + 1), limit):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return start
        return limit

    def _finish(self, found: tuple[int, int, str]) -> tuple[str, str]:
        start, length, self._matched = found
        shown = self._held[: start + length * self._include_stop]
        self._held = ""
        return shown, self._matched


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings of a request, checked.

    Raises:
        RequestError: see `StopMatcher`.
    """
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise RequestError(f"stop is {stop!r}, expected a list of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(stop)} strings, at most {MAX_STOP_STRINGS} are possible; send fewer"
        )
    for index, text in enumerate(stop):
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"stop[{index}] is {text!r}, expected a string of at least one character"
            )
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError(
                f"stop[{index}] is {text!r}, which holds half of a surrogate pair and so cannot "
                "occur in any text; send the whole character"
            )
    return tuple(stop)
