"""Many prompts from a JSONL file through one engine, one line out as each finishes; resumable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from k26jax.engine.output import RequestOutput
from k26jax.engine.request import SamplingParams
from k26jax.errors import RequestError, nearest
from k26jax.llm import LLM

WINDOW = 8
_SAMPLING = [item.name for item in fields(SamplingParams)]
_KNOWN = ["custom_id", "prompt", "prompt_token_ids", *_SAMPLING]


@dataclass(frozen=True)
class Job:
    """One good line of the input."""

    line: int
    custom_id: str
    prompt: str | list[int]
    params: SamplingParams


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be run, and why."""

    line: int
    custom_id: str | None
    error: str


@dataclass
class Counts:
    """How a batch ended."""

    done: int = 0
    failed: int = 0
    skipped: int = 0


def run_batch(llm: LLM, source: Path, target: Path, defaults: dict[str, Any]) -> Counts:
    """Returns the counts after running every line of `source` whose custom_id `target` lacks.

    Results are appended and flushed one by one, so a run that was cut goes on where it was. Lines
    are read a few slots ahead: memory does not grow with the file.

    Args:
      defaults: sampling parameters of lines that bring none.

    Raises: RequestError if the source cannot be read.
    """
    finished = drop_partial_line(target)
    counts = Counts()
    window: list[Job] = []
    size = WINDOW * llm.config.max_running_requests
    with target.open("a", encoding="utf-8") as out, tqdm(unit="row") as bar:
        for job in read_jobs(source, defaults):
            if isinstance(job, BadLine):
                counts.failed += 1
                if (job.line, job.custom_id) not in finished:
                    _write(out, _failure(job.line, job.custom_id, job.error))
                tqdm.write(f"line {job.line}: {job.error}")
            elif job.custom_id in finished:
                counts.skipped += 1
            else:
                window.append(job)
            if len(window) == size:
                _run_window(llm, window, out, bar, counts)
                window = []
        if window:
            _run_window(llm, window, out, bar, counts)
    return counts


def read_jobs(source: Path, defaults: dict[str, Any]) -> Iterator[Job | BadLine]:
    """Yields every line's job, or what is wrong with it; blank lines are passed over.

    Raises: RequestError if the file cannot be read.
    """
    seen: set[str] = set()
    try:
        stream = source.open(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise RequestError(f"cannot read {source}: {error}") from error
    with stream:
        for number, text in enumerate(stream, start=1):
            if not text.strip():
                continue
            custom_id = None
            try:
                data = json.loads(text)
                if not isinstance(data, dict):
                    raise RequestError(f"is a JSON {type(data).__name__}, expected an object")
                custom_id = data.get("custom_id")
                job = _job(number, data, defaults)
                if job.custom_id in seen:
                    raise RequestError(f"custom_id {job.custom_id!r} was used before")
                seen.add(job.custom_id)
                yield job
            except (json.JSONDecodeError, RequestError, TypeError) as error:
                named = custom_id if isinstance(custom_id, str) else None
                yield BadLine(number, named, str(error))


def _job(number: int, data: dict[str, Any], defaults: dict[str, Any]) -> Job:
    for name in data:
        if name not in _KNOWN:
            raise RequestError(f"field {name!r} is unknown{nearest(name, _KNOWN)}")
    custom_id = data.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"custom_id is {custom_id!r}, expected a string")
    prompts = [data[name] for name in ("prompt", "prompt_token_ids") if name in data]
    if len(prompts) != 1 or not isinstance(prompts[0], str | list):
        raise RequestError("expected one of prompt (text) and prompt_token_ids (integers)")
    given = {name: data[name] for name in _SAMPLING if name in data}
    return Job(number, custom_id, prompts[0], SamplingParams(**(defaults | given)))


def drop_partial_line(target: Path) -> set[Any]:
    """Returns what an output file already answers, after cutting off a half-written last line.

    Good lines count by custom_id, bad ones by (line number, custom_id).
    """
    if not target.exists():
        return set()
    finished: set[Any] = set()
    keep = 0
    with target.open("rb+") as stream:
        for line in stream:
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            keep += len(line)
            is_bad = row.get("error") and "line" in row
            finished.add((row["line"], row["custom_id"]) if is_bad else row["custom_id"])
        stream.truncate(keep)
    return finished


def _run_window(llm: LLM, jobs: list[Job], out: Any, bar: tqdm, counts: Counts) -> None:
    outputs = llm.generate([job.prompt for job in jobs], [job.params for job in jobs])
    for job, output in zip(jobs, outputs, strict=True):
        if output.error is not None:
            counts.failed += 1
            _write(out, _failure(job.line, job.custom_id, output.error))
        else:
            counts.done += 1
            _write(out, _success(job, output))
        bar.update()
    metrics = outputs[-1].metrics
    bar.set_postfix(accept=f"{metrics.accept_length:.2f}", tok_s=f"{metrics.tokens_per_second:.0f}")


def _success(job: Job, output: RequestOutput) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "custom_id": job.custom_id,
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(first.token_ids),
        },
        "metrics": {
            "accept_length": first.metrics.accept_length,
            "tokens_per_second": first.metrics.tokens_per_second,
            "ttft_seconds": first.metrics.ttft_seconds,
        },
        "error": None,
    }


def _failure(line: int, custom_id: str | None, error: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "line": line, "error": error}


def _write(out: Any, row: dict[str, Any]) -> None:
    out.write(json.dumps(row) + "\n")
    out.flush()
