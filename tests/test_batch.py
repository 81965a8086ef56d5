"""Batches: refused lines, resuming after any kind of end, the answers of a server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from fixtures.paths import REPOSITORY

import k26jax.batch as batch
from k26jax import LLM
from k26jax.batch import run_batch, run_files, seed_of, settings_for
from k26jax.batch_files import encode, resume
from k26jax.cli import main
from k26jax.errors import RequestError
from k26jax.server.asking import ask
from k26jax.server.errors import ApiError
from k26jax.server.service import Service

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
DEFAULTS = {"temperature": 1.0, "max_tokens": 16}
TEMPLATE = "{{ messages[-1].content }}"


@pytest.fixture(scope="module")
def llm(small_pair, compile_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "small"
    shutil.copytree(small_pair.target, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(**{**small_pair.options, "model_path": str(folder)}) as llm:
        yield llm


@pytest.fixture(scope="module")
def service(llm):
    service = Service(settings_for(("small",), llm.engine.runner.slots, DEFAULTS))
    service.open(llm)
    yield service
    assert service.drain(10)


def line(custom_id: str, url: str = TEXTS, **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture(scope="module")
def rows(small_pair) -> list[dict]:
    """Lines of different lengths, greedy and sampled, with and without a seed, in both forms."""
    letters = small_pair.letters
    messages = [{"role": "user", "content": letters[:5]}]
    return [
        line("text", prompt=letters[:5], temperature=0, max_tokens=12, model="small"),
        {"custom_id": "one", "prompt": letters[3], "max_tokens": 1},
        line("ids", prompt=small_pair.encode(letters[2:6]), top_k=5, n=2),
        line("seed", prompt=letters[1:4], seed=9, max_tokens=20),
        line("chat", CHATS, messages=messages, temperature=0, max_tokens=12),
        line("long", prompt=letters[4:8], max_tokens=40, ignore_eos=True),
        {"custom_id": "中", "messages": messages, "top_p": 0.9},
    ]


def lines_of(rows) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


def records_of(path) -> list[dict]:
    """All lines of a file, each of which must be strict JSON."""

    def refuse(name):
        raise AssertionError(name)

    *lines, rest = path.read_bytes().split(b"\n")
    assert rest == b""
    return [json.loads(line.decode("utf-8"), parse_constant=refuse) for line in lines]


def said(record: dict) -> list:
    """What a record answers, without what differs from one asking to the next."""
    assert set(record) == {"id", "custom_id", "response", "error"}
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    return [record["custom_id"], body["choices"], body["usage"], body["k26jax"], body["model"]]


def answers_of(records) -> dict[str, list]:
    return {record["custom_id"]: said(record) for record in records}


def asked(service, kind: str, body: dict) -> dict:
    """What the server answers to a body, without HTTP."""

    async def answer():
        with ThreadPoolExecutor(1) as planner:
            reply = await ask(service, kind, body, request_id="req-1", planner=planner)
            return await reply.answer()

    return asyncio.run(answer())


@pytest.fixture(scope="module")
def whole(service, rows, tmp_path_factory):
    """The answers of an undisturbed run, by custom_id."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "in").write_bytes(b"".join(lines_of(rows)))
    run_files(service, folder / "in", folder / "out", done=())
    return answers_of(records_of(folder / "out"))


def test_a_line_gets_the_answer_of_the_server(service, llm, rows, whole):
    """A line without a seed has one of the engine's and its custom_id."""
    assert whole.keys() == {row["custom_id"] for row in rows}
    for row in rows:
        body = dict(row.get("body") or row)
        name = row["custom_id"]
        body.pop("custom_id", None)
        kind = "chat" if body.get("messages") else "completion"
        body = {"seed": seed_of(llm.config.seed, name)} | body
        answer = asked(service, kind, body)
        assert [name, *(answer[key] for key in ("choices", "usage", "k26jax", "model"))] == (
            whole[name]
        )
    assert whole["chat"][1][0]["message"]["content"] == whole["text"][1][0]["text"]


def test_a_seed_is_of_the_engines_and_the_custom_id():
    assert len({seed_of(0, "a"), seed_of(1, "a"), seed_of(0, "b"), seed_of(0, "\ud800")}) == 4
    assert all(0 <= seed_of(0, str(i)) < 1 << 63 for i in range(100))


def test_nothing_is_compiled_for_a_batch(llm, whole):
    assert sorted(llm.engine.runner._compiled) == sorted(llm.engine.runner.programs)


def test_lines_are_read_when_there_is_a_place_and_answered_at_once(service, llm, rows):
    """Never more lines are read than answered ones and two for each slot."""
    read, answered, ahead = 0, 0, []

    def lines():
        nonlocal read
        for raw in lines_of({**row, "custom_id": f"{i}"} for i, row in enumerate(rows * 2)):
            read += 1
            ahead.append(read - answered)
            yield raw

    def write(record):
        nonlocal answered
        said(record)
        answered += 1

    summary = run_batch(service, lines(), write)
    assert (summary.succeeded, answered) == (len(rows) * 2,) * 2
    assert max(ahead) == 2 * llm.engine.runner.slots
    assert 1 <= summary.accept_length <= llm.engine.loaded.plan.budget + 1
    assert service.scheduler.wait_idle(10)


@pytest.mark.parametrize("answered", [0, 4])
@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_127_a_run_that_was_cut_goes_on_to_the_same_answers(
    service, rows, whole, tmp_path, monkeypatch, answered, error
):
    """The disk is full, or a fault; half a line more is in the file then."""
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
        run_files(service, source, target, done=resume(target))
    monkeypatch.undo()
    assert service.scheduler.wait_idle(10)
    assert target.read_bytes() == b"".join(map(encode, written))
    with target.open("ab") as stream:
        stream.write(encode({"id": "batch_req_0", "custom_id": "long"})[:30])
    done = resume(target)
    assert done == {record["custom_id"] for record in written}
    summary = run_files(service, source, target, done=done)
    assert (summary.skipped, summary.succeeded) == (answered, len(rows) - answered)
    records = records_of(target)
    assert len(records) == len(rows)
    assert answers_of(records) == whole


def test_127_ctrl_c_finishes_what_is_under_way_and_a_second_one_ends_it(service, llm, rows, whole):
    """The signals come while the first line is written, so that others are under way."""
    written: list[dict] = []

    def write(record, signals):
        written.append(record)
        if len(written) == 1:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)

    # The place of the first line may have been taken by another.
    most = 2 * llm.engine.runner.slots + 1
    summary = run_batch(service, lines_of(rows), lambda record: write(record, 1))
    assert summary.was_interrupted
    assert most - 1 <= len(written) == summary.succeeded <= most < len(rows)
    assert all(said(record) == whole[record["custom_id"]] for record in written)
    written.clear()
    with pytest.raises(KeyboardInterrupt):
        run_batch(service, lines_of(rows), lambda record: write(record, 2))
    assert len(written) < most - 1
    assert service.scheduler.wait_idle(10)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_lines_the_model_cannot_run_are_answered_and_tried_again(
    service, rows, whole, tmp_path, capsys
):
    """A line that the server would refuse has the body of its refusal."""
    source, target = tmp_path / "in", tmp_path / "out"
    bad = [
        line("empty", prompt=""),
        line("outside", prompt=[10**8]),
        line("floats", prompt=[1.5]),
        line("long", prompt=[2] * 1000),
        line("many", prompt="a", n=99),
        line("model", prompt="a", model="other"),
        line("typo", prompt="a", max_token=3),
        line("role", CHATS, messages=[{"role": "robot"}]),
        line("stream", prompt="a", stream=True),
    ]
    source.write_bytes(b"".join(lines_of([*bad, {"custom_id": ""}, rows[0]])))
    summary = run_files(service, source, target, done=resume(target))
    assert (summary.succeeded, summary.failed) == (1, len(bad) + 1)
    records = {record["custom_id"]: record for record in records_of(target)}
    words = ["empty", "vocabulary", "prompt", "1000 tokens", "n = 99", "served: small",
             "did you mean 'max_tokens'", "role is 'robot'", "leave it out"]  # fmt: skip
    for number, (row, word) in enumerate(zip(bad, words, strict=True), start=1):
        response, error = (records[row["custom_id"]][key] for key in ("response", "error"))
        assert error["line"] == number
        assert word in error["message"]
        assert response["status_code"] == (404 if row["custom_id"] == "model" else 400)
        assert response["request_id"].startswith("req-")
        assert response["body"]["error"]["code"] == error["code"]
        if row["custom_id"] != "stream":
            with pytest.raises((ApiError, RequestError)) as info:
                asked(service, "chat" if row["url"] == CHATS else "completion", row["body"])
            assert str(info.value) == response["body"]["error"]["message"] == error["message"]
    assert records[None]["response"] is None
    assert records[None]["error"]["code"] == "invalid_line"
    assert capsys.readouterr().err.count("line ") == len(bad) + 1
    fixed = [rows[5], {**rows[3], "custom_id": "empty"}, *bad[1:3], rows[0]]
    source.write_bytes(b"".join(lines_of(fixed)))
    summary = run_files(service, source, target, done=resume(target))
    assert (summary.succeeded, summary.failed, summary.skipped) == (2, 2, 1)
    records = {record["custom_id"]: record for record in records_of(target)}
    assert len(records) == 5
    assert said(records["long"]) == whole["long"]


def test_127_a_fault_of_the_server_costs_one_line(service, rows, monkeypatch, capsys):
    real, written = batch.ask, []

    async def faulty(service, kind, body, **rest):
        if body.get("max_tokens") == 1:
            raise ValueError("secret")
        return await real(service, kind, body, **rest)

    monkeypatch.setattr(batch, "ask", faulty)
    summary = run_batch(service, lines_of(rows[:2]), written.append)
    assert (summary.succeeded, summary.failed) == (1, 1)
    (record,) = (record for record in written if record["error"])
    assert record["response"]["status_code"] == 500
    assert "secret" not in json.dumps(record)


def test_127_an_engine_that_fails_ends_the_batch(service, llm, rows):
    """It fails because the slots are another service's."""
    other, written = Service(settings_for(("small",), 2, DEFAULTS)), []
    other.open(llm)
    with pytest.raises(RequestError, match="another run of this LLM is in progress"):
        run_batch(other, lines_of(rows), written.append)
    assert written == []


def test_the_command_exits_with_1_until_every_line_is_answered(
    small_pair, compile_cache, rows, tmp_path, capsys
):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    argv = ["batch", "-i", str(source), "-o", str(target), "--max-tokens", "16", *small_pair.flags]
    argv += ["--served-model-name", "small"]
    texts = [row for row in rows if "messages" not in json.dumps(row)]
    source.write_bytes(b"".join(lines_of(texts[:2])) + b"{broken\n" + lines_of(texts[3:4])[0])
    assert main(argv) == 1
    assert "3 answered, 0 skipped, 1 failed" in capsys.readouterr().err
    source.write_bytes(b"".join(lines_of(texts)))
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "2 answered, 3 skipped, 0 failed" in err
    assert "tokens, " in err
    assert out == ""
    assert len(answers_of(records_of(target))) == 5


def test_the_command_refuses_what_would_lose_a_file(small_pair, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"custom_id": "a", "prompt": "x"}\n')
    flags = small_pair.flags
    assert main(["batch", "-i", str(source), "-o", str(source), *flags]) == 2
    assert main(["batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"), *flags]) == 2
    assert main(["batch", "-i", str(source), "-o", str(source), "--outptu", "x"]) == 2
    assert "did you mean '--output'" in capsys.readouterr().err
    assert main(["batch", "-i", str(source), "-o", str(tmp_path / "out"), "other", *flags]) == 2
    assert "given twice" in capsys.readouterr().err
    assert source.read_bytes() == b'{"custom_id": "a", "prompt": "x"}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_the_command_finds_what_is_wrong_before_the_weights_are_read(small_pair, tmp_path, capsys):
    """The folder has no weights: whoever asked for them would say so."""
    folder, source = tmp_path / "model", tmp_path / "in.jsonl"
    shutil.copytree(small_pair.target, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    source.write_bytes(b'{"custom_id": "a", "prompt": "x"}\n')
    good = ["batch", str(folder), "-i", str(source), "-o", str(tmp_path / "out")]
    for argv, words in (
        (["-o", str(tmp_path / "none" / "out")], "none/out cannot be written (No such file"),
        (["-o", str(tmp_path)], "cannot be written (Is a directory)"),
        (["--stop-token-id", "99999"], "token id 99999"),
        (["--max-tokens", "0"], "max_tokens = 0"),
    ):
        assert main([*good, *argv]) == 2
        assert words in capsys.readouterr().err
    assert main(good) == 3
    assert "no *.safetensors" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model"]


def test_the_script_is_the_command_with_four_slots():
    script = REPOSITORY / "scripts" / "generate_batch.py"
    command = [sys.executable, str(script), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert "usage: k26jax batch" in done.stdout
    assert "however few run (default: 4)" in " ".join(done.stdout.split())
