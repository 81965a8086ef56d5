"""Lines of a batch, those of every bad shape too, and outputs that an earlier run has begun."""

from __future__ import annotations

import json

import pytest

import k26jax.batch_files as batch_files
from k26jax.batch_files import BadLine, Line, encode, pieces, read_lines, resume
from k26jax.errors import RequestError

BAD_LINES = [
    (b"{broken", "not JSON"),
    (b"7", "JSON int"),
    (b"[1]", "JSON list"),
    (b"null", "JSON NoneType"),
    (b'{"prompt": "x"}', "custom_id is None"),
    (b'{"custom_id": 7, "prompt": "x"}', "custom_id is 7"),
    (b'{"custom_id": "", "prompt": "x"}', "custom_id"),
    (b'{"custom_id": "a", "prompt": "x"}', "used by an earlier line"),
    (b'{"custom_id": "b", "body": {}, "method": "POST", "ulr": "x"}', "mean 'url'"),
    (b'{"custom_id": "c", "body": {}, "method": "GET", "url": "/v1/completions"}', '"POST"'),
    (b'{"custom_id": "d", "body": {}, "method": "POST"}', "url is None, expected one of /v1"),
    (b'{"custom_id": "e", "body": {}, "method": "POST", "url": ["x"]}', "url is ['x']"),
    (b'{"custom_id": "f", "body": 3, "method": "POST", "url": "/v1/completions"}', "body is 3"),
    (b'{"custom_id": "i", "prompt": "x", "temperature": NaN}', "NaN is no JSON number"),
    (b'{"custom_id": "n", "prompt": "caf\xe9"}', "UTF-8"),
    (b'{"custom_id": "o", "prompt": "x"} {}', "not JSON"),
    (b'{"custom_id": "p", "seed": ' + b"9" * 5000 + b', "prompt": "x"}', "not JSON"),
    (b"[" * 200_000, "too deep"),
    (b"\x00", "not JSON"),
]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_126_139_each_bad_line_is_answered_by_number_and_the_others_are_read(end):
    """Good lines stand first, in the middle and last, without an end."""
    good = [
        b'\xef\xbb\xbf{"custom_id": "a", "prompt": "x", "max_tokens": 3}',
        b"",
        b'  {"custom_id": "z", "method": "POST", "url": "/v1/completions", "body": {"x": 1}} ',
        b" \t",
        b'{"custom_id": "last", "messages": "\\ud83d\\ude00"}',
    ]
    middle = len(BAD_LINES) // 2
    bad = [line for line, _ in BAD_LINES]
    lines = [*good[:2], *bad[:middle], *good[2:4], *bad[middle:], good[4]]
    found = list(read_lines([*(line + end for line in lines[:-1]), lines[-1]]))
    assert [item for item in found if isinstance(item, Line)] == [
        Line(1, "a", "completion", {"prompt": "x", "max_tokens": 3}),
        Line(middle + 3, "z", "completion", {"x": 1}),
        Line(len(lines), "last", "chat", {"messages": "\U0001f600"}),
    ]
    errors = [item for item in found if isinstance(item, BadLine)]
    assert len(errors) == len(BAD_LINES)
    for item, (raw, words) in zip(errors, BAD_LINES, strict=True):
        assert lines[item.number - 1] == raw
        assert words in item.error
    assert [item.custom_id for item in errors[7:9]] == ["a", "b"]
    assert errors[0].custom_id is None


def test_126_a_line_that_is_too_long_is_passed_over_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 50)
    short = encode({"custom_id": "a", "prompt": "x"})
    path, sizes = tmp_path / "in", []
    for filler in (b"9" * 40, b"9" * 500, b"9" * (101 - 4)):
        for end in (b"\n", b""):
            path.write_bytes(short + b"abc" + filler + end)
            with path.open("rb") as stream:
                raw = list(pieces(stream))
            sizes += map(len, raw)
            found = list(read_lines(raw))
            assert [item.number for item in found] == [1, 2]
            words = "not JSON" if len(filler) == 40 else "more than 50 bytes"
            assert words in found[1].error
    assert max(sizes) == 51


def test_a_record_is_one_line_of_strict_json():
    record = {"custom_id": "\u4e2d\n\u2028", "error": None}
    assert encode(record).count(b"\n") == 1
    assert "\u4e2d".encode() in encode(record)
    assert json.loads(encode(record)) == record
    lone = {"custom_id": "\ud800", "error": None}
    assert json.loads(encode(lone).decode("utf-8")) == lone
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"custom_id": "a", "error": None, "x": float("nan")})


def test_a_file_that_is_no_output_is_left_as_it_is(tmp_path):
    target = tmp_path / "out"
    good = encode({"id": "batch_req_1", "custom_id": "a", "response": {}, "error": None})
    for content in (
        b"important\n",
        b"important",
        good + b"{}\n",
        good + b"[1]\n",
        b'{"id": "batch_req_1", "err\n' + good,
        b'{"prompt": "x"',
        encode({"custom_id": "a", "text": "x", "error": None}),
    ):
        target.write_bytes(content)
        with pytest.raises(RequestError, match="not a record"):
            resume(target)
        assert target.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_half_a_line_and_errors_are_dropped_and_the_rest_kept(tmp_path):
    target = tmp_path / "out"
    good = [
        encode({"id": f"batch_req_{name}", "custom_id": name, "response": {}, "error": None})
        for name in "ab"
    ]
    error = encode({"id": "batch_req_0", "custom_id": None, "response": None, "error": {}})
    assert resume(target) == set()
    for cut in range(len(good[1])):
        target.write_bytes(good[0] + error + good[1][:cut])
        assert resume(target) == {"a"}
        assert target.read_bytes() == good[0]
    target.write_bytes(b"".join(good))
    assert resume(target) == {"a", "b"}
    assert target.read_bytes() == b"".join(good)
    target.write_bytes(b"")
    assert resume(target) == set()
