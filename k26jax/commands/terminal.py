"""What people see on standard error while a command runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Self

from tqdm import tqdm

_PLAIN_LINE_SECONDS = 10.0


def say(text: str = "", end: str = "\n") -> None:
    """Prints to standard error at once."""
    print(text, end=end, file=sys.stderr, flush=True)


def uses_color(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether standard error is a terminal whose user did not switch colours off (NO_COLOR)."""
    return sys.stderr.isatty() and not environment.get("NO_COLOR")


class Startup:
    """One line per phase of loading, with its time; the hooks of `LLM` are its methods.

    On a terminal a phase that reads weights has a bar, elsewhere a line every ten seconds. What
    is said after a `with` block stands on a line of its own, even if an error ended the block.
    """

    def __init__(self) -> None:
        self._begun = self._phase_begun = self._said = time.perf_counter()
        self._phase: str | None = None
        self._bar: tqdm | None = None
        self._done = self._total = 0
        self._is_line_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._is_line_open:
            say()
        self._bar, self._is_line_open = None, False

    def on_load(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` bytes of a model's weights are read."""
        if self._phase != what:
            self.finish_phase()
            self._begin(what)
            if sys.stderr.isatty():
                self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False)
        self._done, self._total = done, total
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif time.perf_counter() - self._said > _PLAIN_LINE_SECONDS:
            self._said = time.perf_counter()
            say(f"load {what}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    def on_compile(self, name: str) -> None:
        """Shows that a program is about to be compiled."""
        self.finish_phase()
        self._begin(name)
        self._is_line_open = True
        say(f"compile {name} ... ", end="")

    def finish_phase(self) -> None:
        """Shows how long the phase took that was under way."""
        if self._phase is None:
            return
        seconds = time.perf_counter() - self._phase_begun
        if not self._total:
            say(f"{seconds:.1f} s")
        else:
            if self._bar is not None:
                self._bar.close()
            say(f"load {self._phase}: {self._total / 1e6:.1f} MB in {seconds:.1f} s")
        self._phase = self._bar = None
        self._is_line_open = False
        self._done = self._total = 0

    def ready(self, text: str) -> None:
        """Shows the last line, with the time of everything."""
        self.finish_phase()
        say(f"ready in {time.perf_counter() - self._begun:.1f} s: {text}")

    def _begin(self, phase: str) -> None:
        self._phase = phase
        self._phase_begun = self._said = time.perf_counter()
