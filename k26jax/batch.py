"""Many prompts from JSONL lines through one engine, one line out as soon as each has ended."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from k26jax.engine.request import Request, SamplingParams
from k26jax.errors import K26Error, RequestError, nearest
from k26jax.text.thinking import read_thinking

if TYPE_CHECKING:
    from k26jax.engine.output import CompletionOutput
    from k26jax.llm import LLM
    from k26jax.text.answer import ChatAnswer

PROMPTS = ("prompt", "prompt_token_ids", "messages")
CHAT = ("tools", "chat_template_kwargs")
NOTES = ("metadata", "source")
_SAMPLING = tuple(item.name for item in fields(SamplingParams))
_KNOWN = ("custom_id", *PROMPTS, *CHAT, *_SAMPLING, *NOTES)
_LINE_BEGIN = b'{"custom_id": '
_MAX_MESSAGE = 500
Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Row:
    """A line to run.

    line: its number in the input, from 1.
    prompt: text or token ids, or the messages of a chat.
    chat: what a chat says besides; None for any other prompt.
    """

    line: int
    custom_id: str
    prompt: str | list[Any]
    params: SamplingParams
    chat: dict[str, Any] | None = None


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be run, and why; custom_id is None where it has none."""

    line: int
    custom_id: str | None
    error: str


@dataclass
class Summary:
    """How a batch went so far.

    succeeded, failed, skipped: lines; skipped ones were answered by an earlier run.
    tokens, forwards: generated tokens, and decoding passes through the target (prefills aside).
    following_tokens: tokens of finished lines that those passes gave.
    """

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0
    forwards: int = 0
    following_tokens: int = 0
    begun: float = field(default_factory=time.perf_counter)

    @property
    def lines(self) -> int:
        """Lines dealt with."""
        return self.succeeded + self.failed + self.skipped

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all lines together over the time since the start."""
        return self.tokens / max(time.perf_counter() - self.begun, 1e-9)

    @property
    def accept_length(self) -> float:
        """Tokens per target forward of the finished lines; 0 without any."""
        return self.following_tokens / self.forwards if self.forwards else 0.0


def run_batch(
    llm: LLM,
    lines: Iterable[bytes],
    write: Write,
    *,
    done: Collection[str] = (),
    defaults: dict[str, Any] | None = None,
    on_progress: Callable[[Summary], None] | None = None,
) -> Summary:
    """Returns how it went, after one record was written for every line that `done` lacks.

    Records come in the order in which sequences end. A line is read when a slot is free for it,
    so of the file's lines only their custom_ids are kept. A line without a seed gets the engine's
    plus its number, and so the same tokens in one run and in several.

    Args:
      write: called with each record; what it raises ends the batch.
      defaults: sampling parameters of lines that bring none.
      on_progress: called after every step.
    """
    summary = Summary()
    running: dict[int, tuple[Row, Request, ChatAnswer | None]] = {}
    numbers = itertools.count()  # as the engine numbers its requests

    def fail(line: int, custom_id: str | None, message: str) -> None:
        summary.failed += 1
        error = {"line": line, "message": message[:_MAX_MESSAGE]}
        write({"custom_id": custom_id, "error": error})

    def requests() -> Iterator[Request]:
        for row in read_rows(lines, defaults or {}):
            if isinstance(row, BadLine):
                fail(row.line, row.custom_id, row.error)
            elif row.custom_id in done:
                summary.skipped += 1
            else:
                try:
                    request, answer = _request(llm, row)
                except K26Error as error:
                    fail(row.line, row.custom_id, str(error))
                    continue
                running[next(numbers)] = row, request, answer
                yield request

    with contextlib.closing(llm.engine.run(requests())) as run:
        for number, chunk in run:
            summary.tokens += len(chunk.token_ids)
            if chunk.output is not None:
                summary.succeeded += 1
                summary.forwards += chunk.output.metrics.target_forwards
                summary.following_tokens += len(chunk.output.token_ids) - 1
                write(_record(*running.pop(number), chunk.output))
            if on_progress:
                on_progress(summary)
    return summary


def run_files(
    llm: LLM, source: Path, target: Path, *, done: Collection[str], defaults: dict[str, Any]
) -> Summary:
    """Returns how it went, after `run_batch` from one file to the end of another.

    Bad lines are named on standard error, where a terminal has a progress bar too.

    Args:
      done: what `resume(target)` gave.
    """
    with source.open("rb") as lines, target.open("ab") as out:
        total = sum(1 for _ in lines)
        lines.seek(0)
        with tqdm(total=total, unit="row", disable=None) as bar:

            def write(record: dict[str, Any]) -> None:
                out.write(encode(record))
                out.flush()
                if record["error"] is not None:
                    message = f"line {record['error']['line']}: {record['error']['message']}"
                    tqdm.write(message, file=sys.stderr)

            def show(summary: Summary) -> None:
                bar.update(summary.lines - bar.n)
                speed = f"{summary.tokens_per_second:.0f}"
                length = f"{summary.accept_length:.2f}"
                bar.set_postfix({"tok/s": speed, "accept length": length}, refresh=False)

            return run_batch(llm, lines, write, done=done, defaults=defaults, on_progress=show)


def _request(llm: LLM, row: Row) -> tuple[Request, ChatAnswer | None]:
    """Returns a row's request and, for a chat, the reader of its answer."""
    params = _seeded(row, llm.config.seed)
    if row.chat is None:
        return llm.request(row.prompt, params), None
    said = read_thinking(chat_template_kwargs=row.chat.get("chat_template_kwargs"))
    prompt = llm.chat_format.prompt(
        row.prompt,
        row.chat.get("tools"),
        thinking=said.is_on,
        preserve_thinking=said.is_preserved,
        options=said.options,
    )
    params = llm.shaped(prompt, params)
    return llm.request(prompt.token_ids, params), llm.answer(prompt, params)


def _record(
    row: Row, request: Request, answer: ChatAnswer | None, output: CompletionOutput
) -> dict[str, Any]:
    if answer is not None:
        answer.push(output.token_ids)
        output = replace(output, message=answer.message)
    record = output.record(len(request.prompt_token_ids))
    return {"custom_id": row.custom_id, **record, "error": None}


def _seeded(row: Row, seed: int) -> SamplingParams:
    if row.params.seed is not None:
        return row.params
    return replace(row.params, seed=(seed + row.line) % (1 << 63))


def read_rows(lines: Iterable[bytes], defaults: dict[str, Any]) -> Iterator[Row | BadLine]:
    """Yields every line's row, or what is wrong with the line; blank lines are passed over.

    Takes a byte order mark, CRLF, and a last line without its end.
    """
    seen: set[str] = set()
    for number, raw in enumerate(lines, start=1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if not raw.strip():
            continue
        custom_id = None
        try:
            data = _parse(raw)
            custom_id = _custom_id(data)
            if custom_id in seen:
                raise RequestError(f"custom_id {custom_id!r} was used by an earlier line")
            seen.add(custom_id)
            yield _row(number, custom_id, data, defaults)
        except RequestError as error:
            yield BadLine(number, custom_id, str(error))


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise RequestError("the line is nested too deep") from error
    except ValueError as error:
        raise RequestError(f"the line is not JSON in UTF-8: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(f"the line is a JSON {type(data).__name__}, expected an object")
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _custom_id(data: dict[str, Any]) -> str:
    custom_id = data.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise RequestError(f"custom_id is {custom_id!r:.80}, expected a string")
    return custom_id


def _row(line: int, custom_id: str, data: dict[str, Any], defaults: dict[str, Any]) -> Row:
    for name in data:
        if name not in _KNOWN:
            raise RequestError(f"field {name!r:.80} is unknown{nearest(name[:80], _KNOWN)}")
    prompts = {name: data[name] for name in PROMPTS if data.get(name) is not None}
    if len(prompts) != 1:
        raise RequestError(f"{len(prompts)} of the fields {' and '.join(PROMPTS)}; expected one")
    ((name, prompt),) = prompts.items()
    kind = str if name == "prompt" else list
    if not isinstance(prompt, kind):
        raise RequestError(f"{name} is {prompt!r:.80}, expected a {kind.__name__}")
    params = {name: data[name] for name in _SAMPLING if name in data}
    chat = {name: data[name] for name in CHAT if data.get(name) is not None}
    if chat and name != "messages":
        raise RequestError(f"field {next(iter(chat))!r} is of a chat; give messages, not {name}")
    return Row(
        line,
        custom_id,
        prompt,
        SamplingParams(**(defaults | params)),
        chat if name == "messages" else None,
    )


def require_writable(path: Path) -> None:
    """Raises RequestError unless records can be appended to a file; leaves no file behind."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise RequestError(
            f"the output {path} cannot be written ({error.strerror}); give another file"
        ) from error
    if not existed:
        path.unlink()


def resume(path: Path) -> set[str]:
    """Returns the custom_ids that an earlier run's output answers, and tidies the file.

    Lines with an error are taken out, so that this run tries them again, and so is a half-written
    last line; afterwards records can be appended.

    Raises: RequestError if the file holds anything else; it is left as it is then.
    """
    if not path.exists():
        return set()
    done: set[str] = set()
    keep: list[bool] = []
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            answered = _answered(raw)
            if answered is None:
                raise RequestError(
                    f"{path} line {number} is not a record of a batch; give another output file, "
                    "or move this one away"
                )
            keep.append(bool(answered))
            if answered:
                done.add(answered)
    if not all(keep):
        _keep_lines(path, keep)
    return done


def _answered(raw: bytes) -> str | None:
    """Returns the custom_id of a good record, "" for one to drop, None for no record at all."""
    if not raw.endswith(b"\n"):
        begins = raw.startswith(_LINE_BEGIN) or _LINE_BEGIN.startswith(raw)
        return "" if begins else None
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or not {"custom_id", "error"} <= record.keys():
        return None
    return "" if record["error"] is not None else str(record["custom_id"])


def _keep_lines(path: Path, keep: list[bool]) -> None:
    """Rewrites a file with some of its lines; at every moment one whole version is there."""
    path = path.resolve()
    beside = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, beside.open("wb") as new:
        new.writelines(raw for raw, is_kept in zip(old, keep, strict=True) if is_kept)
        new.flush()
        os.fsync(new.fileno())
    os.replace(beside, path)


def encode(record: dict[str, Any]) -> bytes:
    """Returns a record as one line."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        # Half of a surrogate pair, which a custom_id may hold and UTF-8 may not.
        return json.dumps(record, allow_nan=False).encode() + b"\n"
