"""Batches: lines of every bad shape, resuming after any kind of end, the tokens of single runs."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
from fixtures.paths import REPOSITORY

import k26jax.batch as batch
from k26jax import LLM, SamplingParams
from k26jax.batch import BadLine, Row, encode, read_rows, resume, run_batch, run_files
from k26jax.errors import RequestError


@pytest.fixture(scope="module")
def llm(small_pair, compile_cache):
    with LLM(**small_pair.options) as llm:
        yield llm


@pytest.fixture(scope="module")
def rows(small_pair) -> list[dict]:
    """Seven rows of different lengths, greedy and sampled, with and without a seed."""
    letters = small_pair.letters
    return [
        {"custom_id": "text", "prompt": letters[:5], "temperature": 0, "max_tokens": 12},
        {"custom_id": "one", "prompt": letters[3], "max_tokens": 1},
        {"custom_id": "ids", "prompt_token_ids": small_pair.encode(letters[2:6]), "top_k": 5},
        {"custom_id": "seed", "prompt": letters[1:4], "seed": 9, "max_tokens": 20},
        {"custom_id": "stop", "prompt": letters[:2], "stop": list(letters[:4]), "min_p": 0.01},
        {"custom_id": "long", "prompt": letters[4:8], "max_tokens": 40, "ignore_eos": True},
        {"custom_id": "中", "prompt": letters[2], "prompt_token_ids": None, "top_p": 0.9},
    ]


DEFAULTS = {"temperature": 1.0, "max_tokens": 16}


def lines_of(rows) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


def records_of(path) -> list[dict]:
    """All lines of a file, each of which must be strict JSON."""

    def refuse(name):
        raise AssertionError(name)

    *lines, rest = path.read_bytes().split(b"\n")
    assert rest == b""
    return [json.loads(line.decode("utf-8"), parse_constant=refuse) for line in lines]


def tokens_of(records) -> dict[str, list[int]]:
    return {record["custom_id"]: record["token_ids"] for record in records}


@pytest.fixture(scope="module")
def whole(llm, rows, tmp_path_factory):
    """The records of an undisturbed run, by custom_id."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "in").write_bytes(b"".join(lines_of(rows)))
    run_files(llm, folder / "in", folder / "out", done=(), defaults=DEFAULTS)
    return {record["custom_id"]: record for record in records_of(folder / "out")}


BAD_LINES = [
    (b"{broken", "not JSON"),
    (b"7", "JSON int"),
    (b"[1]", "JSON list"),
    (b"null", "JSON NoneType"),
    (b'{"prompt": "x"}', "custom_id is None"),
    (b'{"custom_id": 7, "prompt": "x"}', "custom_id is 7"),
    (b'{"custom_id": "", "prompt": "x"}', "custom_id"),
    (b'{"custom_id": "a", "prompt": "x"}', "used by an earlier line"),
    (b'{"custom_id": "b", "promt": "x"}', "'promt' is unknown; did you mean 'prompt'"),
    (b'{"custom_id": "c", "prompt": "x", "max_token": 3}', "did you mean 'max_tokens'"),
    (b'{"custom_id": "d"}', "0 of the fields"),
    (b'{"custom_id": "e", "prompt": "x", "prompt_token_ids": [1]}', "2 of the fields"),
    (b'{"custom_id": "f", "prompt": ["x"]}', "prompt is ['x'], expected a str"),
    (b'{"custom_id": "g", "prompt_token_ids": "x"}', "expected a list"),
    (b'{"custom_id": "h", "prompt": "x", "temperature": -1}', "temperature = -1"),
    (b'{"custom_id": "i", "prompt": "x", "temperature": NaN}', "NaN is no JSON number"),
    (b'{"custom_id": "j", "prompt": "x", "top_p": 1e999}', "top_p = inf"),
    (b'{"custom_id": "k", "prompt": "x", "stop": 5}', "stop = 5"),
    (b'{"custom_id": "l", "prompt": "x", "ignore_eos": "no"}', "ignore_eos = 'no'"),
    (b'{"custom_id": "m", "prompt": "x", "logprobs": 30}', "logprobs"),
    (b'{"custom_id": "n", "prompt": "caf\xe9"}', "UTF-8"),
    (b'{"custom_id": "o", "prompt": "x"} {}', "not JSON"),
    (b'{"custom_id": "p", "seed": ' + b"9" * 5000 + b', "prompt": "x"}', "not JSON"),
    (b"[" * 200_000, "too deep"),
    (b"\x00", "not JSON"),
]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_each_bad_line_is_answered_by_number_and_the_others_are_read(end):
    """Bug log 126 and 139; good lines stand first, in the middle and last, without an end."""
    good = [
        b'\xef\xbb\xbf{"custom_id": "a", "prompt": "x", "max_tokens": 3}',
        b"",
        b'  {"custom_id": "z", "prompt_token_ids": [1, 2], "metadata": {"k": 1}, "prompt": null} ',
        b" \t",
        b'{"custom_id": "last", "prompt": "\\ud83d\\ude00", "temperature": 0}',
    ]
    middle = len(BAD_LINES) // 2
    bad = [line for line, _ in BAD_LINES]
    lines = [*good[:2], *bad[:middle], *good[2:4], *bad[middle:], good[4]]
    found = list(read_rows([*(line + end for line in lines[:-1]), lines[-1]], {"top_k": 4}))
    rows = [row for row in found if isinstance(row, Row)]
    assert [(row.line, row.custom_id) for row in rows] == [
        (1, "a"),
        (middle + 3, "z"),
        (len(lines), "last"),
    ]
    assert rows[0].params == SamplingParams(max_tokens=3, top_k=4)
    assert rows[1].prompt == [1, 2]
    assert rows[2].prompt == "\U0001f600"
    assert rows[2].params == SamplingParams(temperature=0, top_k=4)
    errors = [row for row in found if isinstance(row, BadLine)]
    assert len(errors) == len(BAD_LINES)
    for row, (line, words) in zip(errors, BAD_LINES, strict=True):
        assert lines[row.line - 1] == line
        assert words in row.error
    assert [row.custom_id for row in errors[7:9]] == ["a", "b"]
    assert errors[0].custom_id is None


def test_a_record_is_one_line_of_strict_json():
    record = {"custom_id": "\u4e2d\n\u2028", "error": None}
    assert encode(record).count(b"\n") == 1
    assert "\u4e2d".encode() in encode(record)
    assert json.loads(encode(record)) == record
    lone = {"custom_id": "\ud800", "error": None}
    assert json.loads(encode(lone).decode("utf-8")) == lone
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"custom_id": "a", "error": None, "x": float("nan")})


def test_rows_get_the_tokens_of_single_requests(llm, rows, whole, small_pair):
    """A row without a seed has the engine's plus its line number."""
    assert whole.keys() == {row["custom_id"] for row in rows}
    for line, row in enumerate(rows, start=1):
        given = {name: value for name, value in row.items() if not name.startswith(("cu", "pr"))}
        params = SamplingParams(**(DEFAULTS | {"seed": llm.config.seed + line} | given))
        prompt = row.get("prompt") or row["prompt_token_ids"]
        (output,) = llm.generate(prompt, params)[0].outputs
        record = whole[row["custom_id"]]
        assert record["error"] is None
        assert record["token_ids"] == output.token_ids, row
        assert (record["text"], record["finish_reason"]) == (output.text, output.finish_reason)
        assert record["usage"]["completion_tokens"] == len(output.token_ids)
        assert record["usage"]["prompt_tokens"] == len(prompt)
        assert record["metrics"]["accept_length"] == output.metrics.accept_length
    assert whole["text"]["text"] == small_pair.decode(whole["text"]["token_ids"])


def test_nothing_is_compiled_for_a_batch(llm, whole):
    assert sorted(llm.engine.runner._compiled) == sorted(llm.engine.runner.programs)


def test_lines_are_read_when_a_slot_is_free_and_answered_at_once(llm, rows):
    """Never more lines are read than answered ones, one for each slot and one."""
    read, answered, ahead = 0, 0, []

    def lines():
        nonlocal read
        for line in lines_of({**row, "custom_id": f"{i}"} for i, row in enumerate(rows * 2)):
            read += 1
            ahead.append(read - answered)
            yield line

    def write(record):
        nonlocal answered
        answered += 1

    summary = run_batch(llm, lines(), write, defaults=DEFAULTS)
    assert (summary.succeeded, answered) == (len(rows) * 2,) * 2
    assert max(ahead) == llm.engine.runner.slots


@pytest.mark.parametrize("answered", [0, 1, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_was_cut_goes_on_to_the_same_records(
    llm, rows, whole, tmp_path, monkeypatch, answered, error
):
    """Bug log 127: Ctrl-C, or the engine fails; half a line more is in the file then."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"".join(lines_of(rows)))
    written = []

    def cut(record):
        if len(written) == answered:
            raise error("cut")
        written.append(record)
        return encode(record)

    monkeypatch.setattr(batch, "encode", cut)
    with pytest.raises(error):
        run_files(llm, source, target, done=resume(target), defaults=DEFAULTS)
    monkeypatch.undo()
    assert target.read_bytes() == b"".join(map(encode, written))
    with target.open("ab") as stream:
        stream.write(encode(whole["long"])[:30])
    done = resume(target)
    assert done == {record["custom_id"] for record in written}
    summary = run_files(llm, source, target, done=done, defaults=DEFAULTS)
    assert (summary.skipped, summary.succeeded) == (answered, len(rows) - answered)
    records = records_of(target)
    assert len(records) == len(rows)
    assert tokens_of(records) == tokens_of(whole.values())


def test_rows_the_model_cannot_run_are_answered_and_tried_again(llm, rows, whole, tmp_path, capsys):
    source, target = tmp_path / "in", tmp_path / "out"
    bad = [
        {"custom_id": "empty", "prompt": ""},
        {"custom_id": "outside", "prompt_token_ids": [10**30]},
        {"custom_id": "floats", "prompt_token_ids": [1.5]},
        {"custom_id": "long", "prompt_token_ids": [2] * 1000},
        {"custom_id": "many", "prompt": "a", "n": 2},
        {"custom_id": "huge", "prompt_token_ids": [10**300] * 1000},
    ]
    source.write_bytes(b"".join(lines_of([*bad, rows[0]])))
    summary = run_files(llm, source, target, done=resume(target), defaults=DEFAULTS)
    assert (summary.succeeded, summary.failed) == (1, len(bad))
    records = {record["custom_id"]: record for record in records_of(target)}
    words = ["empty", "vocabulary", "token ids", "1000 tokens", "n = 2", "vocabulary"]
    for line, (row, word) in enumerate(zip(bad, words, strict=True), start=1):
        error = records[row["custom_id"]]["error"]
        assert error["line"] == line
        assert word in error["message"]
        assert len(error["message"]) <= 500
    assert capsys.readouterr().err.count("line ") == len(bad)
    fixed = [rows[5], {**rows[3], "custom_id": "empty"}, *bad[1:3], rows[0]]
    source.write_bytes(b"".join(lines_of(fixed)))
    summary = run_files(llm, source, target, done=resume(target), defaults=DEFAULTS)
    assert (summary.succeeded, summary.failed, summary.skipped) == (2, 2, 1)
    records = {record["custom_id"]: record for record in records_of(target)}
    assert len(records) == 5
    assert records["long"]["token_ids"]
    assert records["text"]["token_ids"] == whole["text"]["token_ids"]


def test_a_file_that_is_no_output_is_left_as_it_is(tmp_path):
    target = tmp_path / "out"
    good = encode({"custom_id": "a", "error": None})
    for content in (
        b"important\n",
        b"important",
        good + b"{}\n",
        good + b"[1]\n",
        b'{"custom_id": "b", "err\n' + good,
        b'{"prompt": "x"',
    ):
        target.write_bytes(content)
        with pytest.raises(RequestError, match="not a record"):
            resume(target)
        assert target.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_half_a_line_and_errors_are_dropped_and_the_rest_kept(tmp_path):
    target = tmp_path / "out"
    good = [encode({"custom_id": name, "error": None}) for name in "ab"]
    error = encode({"custom_id": None, "error": {"line": 3, "message": "m"}})
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


@pytest.fixture
def script():
    path = REPOSITORY / "scripts" / "generate_batch.py"
    spec = importlib.util.spec_from_file_location("generate_batch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_the_script_exits_with_1_until_every_line_is_answered(
    script, small_pair, compile_cache, rows, whole, tmp_path, capsys
):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    argv = ["-i", str(source), "-o", str(target), "--max-tokens", "16", *small_pair.flags]
    source.write_bytes(b"".join(lines_of(rows[:2])) + b"{broken\n" + lines_of(rows[3:4])[0])
    assert script(argv) == 1
    assert "3 answered, 0 skipped, 1 failed" in capsys.readouterr().err
    source.write_bytes(b"".join(lines_of(rows[:5])))
    assert script(argv) == 0
    out, err = capsys.readouterr()
    assert "2 answered, 3 skipped, 0 failed" in err
    assert out == ""
    found = tokens_of(records_of(target))
    assert found == {name: whole[name]["token_ids"] for name in found}
    assert len(found) == 5


def test_the_script_refuses_what_would_lose_a_file(script, small_pair, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"custom_id": "a", "prompt": "x"}\n')
    flags = small_pair.flags
    assert script(["-i", str(source), "-o", str(source), *flags]) == 2
    assert script(["-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"), *flags]) == 2
    assert script(["-i", str(source), "-o", str(source), "--outptu", "x"]) == 2
    assert "did you mean '--output'" in capsys.readouterr().err
    assert source.read_bytes() == b'{"custom_id": "a", "prompt": "x"}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_the_script_finds_what_is_wrong_before_the_weights_are_read(
    script, small_pair, tmp_path, capsys
):
    """The folder has no weights: whoever asked for them would say so."""
    folder, source = tmp_path / "model", tmp_path / "in.jsonl"
    shutil.copytree(small_pair.target, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    source.write_bytes(b'{"custom_id": "a", "prompt": "x"}\n')
    good = ["-i", str(source), "-o", str(tmp_path / "out"), "--model-path", str(folder)]
    for argv, words in (
        (["-o", str(tmp_path / "none" / "out")], "none/out cannot be written (No such file"),
        (["-o", str(tmp_path)], "cannot be written (Is a directory)"),
        (["--stop-token-id", "99999"], "token id 99999"),
        (["--max-tokens", "0"], "max_tokens = 0"),
    ):
        assert script([*good, *argv]) == 2
        assert words in capsys.readouterr().err
    assert script(good) == 3
    assert "no *.safetensors" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model"]


def test_the_script_decodes_four_sequences_together(script, capsys):
    assert script(["--help"]) == 0
    assert "however few run (default: 4)" in " ".join(capsys.readouterr().out.split())
