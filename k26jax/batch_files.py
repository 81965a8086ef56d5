"""Lines of a batch: requests in, records out, and an output that an earlier run has begun."""

from __future__ import annotations

import codecs
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k26jax.errors import RequestError, nearest
from k26jax.server.fields import CHAT, COMPLETION

URLS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
MAX_LINE_BYTES = 32 << 20
_ENVELOPE = ("custom_id", "method", "url", "body")
_LINE_BEGIN = b'{"id": "batch_req_'


@dataclass(frozen=True)
class Line:
    """A line to answer.

    number: its place in the input, from 1.
    kind: of request, as `k26jax.server.fields` names it.
    """

    number: int
    custom_id: str
    kind: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line that is no request, and why; custom_id is None where it has none."""

    number: int
    custom_id: str | None
    error: str


def pieces(stream: Any) -> Iterator[bytes]:
    """Yields the lines of a file; of one that is too long its beginning, which is too long too."""
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        yield raw
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raw = stream.readline(MAX_LINE_BYTES + 1) or b"\n"


def read_lines(lines: Iterable[bytes]) -> Iterator[Line | BadLine]:
    """Yields every line's request, or what is wrong with the line; blank lines are passed over.

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
            if len(raw) > MAX_LINE_BYTES:
                raise RequestError(f"the line has more than {MAX_LINE_BYTES} bytes")
            data = _parse(raw)
            custom_id = _custom_id(data)
            if custom_id in seen:
                raise RequestError(f"custom_id {custom_id!r} was used by an earlier line")
            seen.add(custom_id)
            yield Line(number, custom_id, *_request(data))
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


def _request(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns kind and body of a line: the body's fields may stand beside custom_id themselves."""
    if not any(name in data for name in _ENVELOPE[1:]):
        body = {name: value for name, value in data.items() if name != "custom_id"}
        return CHAT if body.get("messages") is not None else COMPLETION, body
    for name in data:
        if name not in _ENVELOPE:
            hint = nearest(name[:80], _ENVELOPE)
            raise RequestError(f"field {name!r:.80} beside the body is unknown{hint}")
    method, url, body = (data.get(name) for name in _ENVELOPE[1:])
    if method != "POST":
        raise RequestError(f'method is {method!r:.80}, expected "POST"')
    if not isinstance(url, str) or url not in URLS:
        raise RequestError(f"url is {url!r:.80}, expected one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise RequestError(f"body is {body!r:.80}, expected an object")
    return URLS[url], body


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
    if not isinstance(record, dict) or not {"custom_id", "response", "error"} <= record.keys():
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


def record_of(
    custom_id: str | None, request_id: str | None, status: int, body: dict[str, Any]
) -> dict[str, Any]:
    """Returns the record of an answered line."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    id = f"batch_req_{secrets.token_hex(12)}"
    return {"id": id, "custom_id": custom_id, "response": response, "error": None}
