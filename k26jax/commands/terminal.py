"""What people see on standard error while a command runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from k26jax.errors import KernelError

_PLAIN_LINE_SECONDS = 10.0


def say(text: str = "", end: str = "\n") -> None:
    """Prints to standard error at once."""
    print(text, end=end, file=sys.stderr, flush=True)


def uses_color(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether standard error is a terminal whose user did not switch colours off (NO_COLOR)."""
    return sys.stderr.isatty() and not environment.get("NO_COLOR")


def new_figure(size: tuple[float, float]) -> Any:
    """Returns an empty picture of this many inches, which opens no window.

    Raises: KernelError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise KernelError("--plot needs matplotlib; pip install 'k26jax[bench]'") from None
    return Figure(figsize=size, layout="constrained")


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


class ByteProgress:
    """Bytes done, their rate and the time left: a bar on a terminal, else a line now and then."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._kept = what, total, 0, 0
        self._begun = self._said = time.perf_counter()
        self._bar: tqdm | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=self._total, desc=self._what, unit="B", unit_scale=True, leave=False
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            say(f"{self._what}: {self.rate()}")

    def skip(self, size: int) -> None:
        """Counts bytes that an earlier run has done; they say nothing about the rate."""
        self._kept += size
        if self._bar is not None:
            self._bar.total -= size
            self._bar.refresh()

    def advance(self, size: int) -> None:
        """Counts bytes that are done."""
        self._done += size
        if self._bar is not None:
            self._bar.update(size)
        elif time.perf_counter() - self._said > _PLAIN_LINE_SECONDS:
            self._said = time.perf_counter()
            left = (self._total - self._kept - self._done) * self.seconds / max(self._done, 1)
            say(f"{self._what}: {self.rate()}, {left:.0f} s left")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begun

    def rate(self) -> str:
        """Returns what is done, in how long, and how fast."""
        to_do = self._total - self._kept
        of = "" if self._done == to_do else f"of {to_do / 1e6:,.1f} "
        kept = f" (and {self._kept / 1e6:,.1f} MB of an earlier run)" if self._kept else ""
        done, seconds = self._done / 1e6, max(self.seconds, 1e-9)
        return f"{done:,.1f} {of}MB in {seconds:.1f} s, {done / seconds:,.0f} MB/s{kept}"


def peak_host_bytes() -> int | None:
    """Returns the most memory this process has held so far; None where Linux does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    peak = next((line for line in lines if line.startswith("VmHWM:")), None)
    return None if peak is None else int(peak.split()[1]) << 10
