"""Figures of a run of `bench serving`, under the names that other engines' benchmarks give them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from k26jax.bench.serving import Outcome, Run

_WIDTH = 50
_PERCENTILES = (50, 90, 95, 99)
# Key, name in lines, heading.
_TIMES = (
    ("e2e", "E2E Latency", "End-to-End Latency"),
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-Token Latency"),
    ("iel", "IEL", "Inter-Event Latency"),
)


def figures(run: Run) -> dict[str, Any]:
    """Returns the figures: times in milliseconds, those of a failed request in none.

    ttft: to the first event with text. tpot: what follows it over the tokens but the first. itl:
    gaps between events, one that brings several tokens counted as often and shared among them if
    the server tells how many (`itl_is_per_token`). iel: the same gaps as they are.
    """
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    seconds = max(run.seconds, 1e-9)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    tokens = sum(outcome.tokens for outcome in good)
    found: dict[str, Any] = {
        "completed": len(good),
        "failed": len(run.outcomes) - len(good),
        "duration": run.seconds,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": len(good) / seconds,
        "input_throughput": prompt_tokens / seconds,
        "output_throughput": tokens / seconds,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(run.outcomes),
        "total_throughput": (prompt_tokens + tokens) / seconds,
        "concurrency": sum(outcome.ended for outcome in good) / seconds,
        "accept_length": run.accept_length,
        "are_tokens_counted": all(outcome.is_counted for outcome in good),
        "itl_is_per_token": bool(good) and all(_tells_tokens(outcome) for outcome in good),
    }
    times: dict[str, list[float]] = {name: [] for name, _, _ in _TIMES}
    for outcome in good:
        moments = [moment for moment, _ in outcome.events]
        times["e2e"].append(outcome.ended)
        times["ttft"].append(moments[0])
        if outcome.tokens > 1:
            times["tpot"].append((moments[-1] - moments[0]) / (outcome.tokens - 1))
        gaps = [after - before for before, after in itertools.pairwise(moments)]
        times["iel"] += gaps
        times["itl"] += _shared(outcome, gaps) if found["itl_is_per_token"] else gaps
    for name, values in times.items():
        found |= _statistics(name, values)
    return found


def _tells_tokens(outcome: Outcome) -> bool:
    return all(count is not None for _, count in outcome.events)


def _shared(outcome: Outcome, gaps: Sequence[float]) -> list[float]:
    """Returns the gaps, each shared among the tokens that came after it."""
    counts = [count or 0 for _, count in outcome.events]
    shared = []
    for gap, (before, after) in zip(gaps, itertools.pairwise(counts), strict=True):
        tokens = max(after - before, 1)
        shared += [gap / tokens] * tokens
    return shared


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = 1000 * np.asarray(seconds, np.float64)
    measures = {"mean": np.mean, "median": np.median, "std": np.std, "max": np.max}
    if not values.size:
        return {}
    found = {f"{what}_{name}_ms": float(f(values)) for what, f in measures.items()}
    for share in _PERCENTILES:
        found[f"p{share}_{name}_ms"] = float(np.percentile(values, share))
    return found


def _peak_tokens(outcomes: Sequence[Outcome]) -> int:
    """Returns the most tokens that came within one second of the clock; events, if none told."""
    seconds: Counter[int] = Counter()
    for outcome in outcomes:
        before = 0
        for moment, count in outcome.events:
            now = before + 1 if count is None else count
            seconds[int(outcome.started + moment)] += now - before
            before = now
    return max(seconds.values(), default=0)


def _peak_requests(outcomes: Sequence[Outcome]) -> int:
    """Returns the most requests that were under way at one time."""
    marks = [(outcome.started, 1) for outcome in outcomes]
    marks += [(outcome.started + outcome.ended, -1) for outcome in outcomes]
    most = now = 0
    for _, step in sorted(marks):
        now += step
        most = max(most, now)
    return most


def report(found: dict[str, Any], asked: dict[str, Any]) -> str:
    """Returns the figures as text, with the labels that scripts look for.

    Args:
        asked: backend, request_rate and max_concurrency.
    """
    return "\n".join(_lines(found, asked))


def _lines(found: dict[str, Any], asked: dict[str, Any]) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Backend:", asked["backend"])
    yield _line("Traffic request rate:", asked["request_rate"])
    yield _line("Max request concurrency:", asked["max_concurrency"] or "not set")
    for label, name in (
        ("Successful requests:", "completed"),
        ("Failed requests:", "failed"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Input token throughput (tok/s):", "input_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_throughput"),
        ("Concurrency:", "concurrency"),
        ("Accept length:", "accept_length"),
    ):
        if found[name] is not None:
            yield _line(label, found[name])
    for key, name, heading in _TIMES:
        if f"mean_{key}_ms" not in found:
            continue
        yield f"{heading:-^{_WIDTH}}"
        for what in ("Mean", "Median", "P90", "P95", "P99", "Max"):
            yield _line(f"{what} {name} (ms):", found[f"{what.lower()}_{key}_ms"])
    yield "=" * _WIDTH
    if not found["are_tokens_counted"]:
        yield "The server tells no usage: an event counts as a token."
    elif not found["itl_is_per_token"]:
        yield "ITL is from event to event: the server does not tell how many tokens each brings."


def _line(label: str, value: Any) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) and np.isfinite(value) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()
