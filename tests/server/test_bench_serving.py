"""`k26jax bench serving`: its figures by hand, this server, another one, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from scripted import NAME, ids_of, scripted

from k26jax.bench.serving import Client, Outcome, Run, Traffic
from k26jax.bench.serving_prompts import Lengths, file_bodies, random_bodies
from k26jax.bench.serving_report import figures, report
from k26jax.cli import main
from k26jax.errors import RequestError

ASKED = {"backend": "openai", "request_rate": "inf", "max_concurrency": 1}


def test_figures_of_two_requests():
    """Three tokens in two events, and four in two; one more has failed."""
    one = Outcome(0.0, [(0.1, 1), (0.3, 3)], 0.4, 10, 3, True)
    two = Outcome(0.2, [(0.2, 1), (0.8, 4)], 1.0, 20, 4, True)
    bad = Outcome(0.3, [], 0.1, error="500: no")
    found = figures(Run([one, two, bad], 1.2, 2.5))
    expected = {
        "completed": 2, "failed": 1, "total_input_tokens": 30, "total_output_tokens": 7,
        "output_throughput": 7 / 1.2, "total_throughput": 37 / 1.2, "concurrency": 1.4 / 1.2,
        "request_throughput": 2 / 1.2, "max_concurrent_requests": 3, "accept_length": 2.5,
        "max_output_tokens_per_s": 4, "itl_is_per_token": True, "are_tokens_counted": True,
        "mean_e2e_ms": 700, "median_ttft_ms": 150, "p90_ttft_ms": 190, "max_ttft_ms": 200,
        "mean_tpot_ms": 150, "p50_itl_ms": 200, "mean_itl_ms": 160, "max_itl_ms": 200,
        "mean_iel_ms": 400, "p99_iel_ms": 596,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    text = report(found, ASKED)
    lines = dict(re.findall(r"^(.*?): +(\S+)$", text, re.MULTILINE))
    assert lines["Successful requests"] == "2"
    assert lines["Mean TTFT (ms)"] == "150.00"
    assert lines["P99 E2E Latency (ms)"] == "994.00"
    assert lines["Accept length"] == "2.50"
    assert all(len(line) <= 51 for line in text.splitlines())
    headings = [line.strip("-") for line in text.splitlines() if line.startswith("--")]
    assert headings == ["End-to-End Latency", "Time to First Token",
                        "Time per Output Token (excl. 1st token)", "Inter-Token Latency",
                        "Inter-Event Latency"]  # fmt: skip


def test_143_figures_where_nothing_is_told_and_where_nothing_succeeds():
    one = Outcome(0.0, [(0.1, None), (0.3, None), (0.4, None)], 0.4, 0, 3)
    found = figures(Run([one], 0.4, None))
    assert not found["itl_is_per_token"]
    assert found["mean_itl_ms"] == found["mean_iel_ms"] == pytest.approx(150)
    text = report(found, ASKED)
    assert "tells no usage" in text
    assert "Accept length" not in text
    found = figures(Run([Outcome(error="x")], 0.0, None))
    assert (found["completed"], found["failed"]) == (0, 1)
    assert "TTFT" not in report(found, ASKED)


def test_143_answers_of_one_token_have_no_time_per_further_token():
    ones = [Outcome(0.0, [(0.1, 1)], 0.1, 5, 1, True) for _ in range(2)]
    found = figures(Run(ones, 0.2, None))
    assert (found["completed"], found["total_output_tokens"]) == (2, 2)
    assert found["mean_ttft_ms"] == pytest.approx(100)
    assert "TTFT" in report(found, ASKED)
    assert "nan" not in json.dumps(found).lower()


def test_random_bodies_have_the_lengths_asked_for():
    for endpoint in ("completions", "chat"):
        bodies = random_bodies(endpoint, 50, Lengths(40, 20, 0.5), seed=3)
        assert bodies == random_bodies(endpoint, 50, Lengths(40, 20, 0.5), seed=3)
        assert bodies != random_bodies(endpoint, 50, Lengths(40, 20, 0.5), seed=4)
        texts = [b["prompt"] if "prompt" in b else b["messages"][0]["content"] for b in bodies]
        sizes = {len(text.split()) for text in texts}
        assert (min(sizes), max(sizes)) == (20, 40)
        assert {body["max_tokens"] for body in bodies} == set(range(10, 21))
    bodies = random_bodies("completions", 9, Lengths(30, vocabulary=7), seed=3)
    assert {len(body["prompt"]) for body in bodies} == {30}
    assert {id for body in bodies for id in body["prompt"]} == set(range(7))
    with pytest.raises(RequestError, match="a chat does not take"):
        random_bodies("chat", 1, Lengths(vocabulary=7), seed=1)


def test_bodies_of_a_file(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"custom_id": "a", "prompt": "x", "max_tokens": 3}\n\n'
        '{"custom_id": "b", "body": {"prompt": [1, 2]}, "url": "/v1/completions"}\n'
    )
    assert file_bodies("completions", 3, path, 9) == [
        {"prompt": "x", "max_tokens": 3},
        {"prompt": [1, 2], "max_tokens": 9},
        {"prompt": "x", "max_tokens": 3},
    ]
    chat = file_bodies("chat", None, path, 9)
    assert chat[0] == {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    for bad, words in (("{", "line 1 is not JSON"), ("[]", "expected an object"), ("", "no line"),
                       ('{"messages": []}', "with --endpoint chat")):  # fmt: skip
        path.write_text(bad)
        with pytest.raises(RequestError, match=words):
            file_bodies("completions", None, path, 9)
    with pytest.raises(RequestError, match="cannot be read"):
        file_bodies("chat", None, tmp_path / "none", 9)


@pytest.fixture(scope="module")
def server():
    """Every answer: one token, then runs of three, seven tokens in all."""
    ids = ids_of("</think>a b c d e f g h i")[:7]
    with scripted(lambda request: [ids[:1], ids[1:4], ids[4:]], keepalive_seconds=0.1) as server:
        yield server


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_this_server(server, endpoint, tmp_path, capsys):
    path = tmp_path / "out.json"
    argv = ["bench", "serving", "--base-url", server.url + "/v1/", "--endpoint", endpoint]
    argv += ["--num-prompts", "6", "--random-input-len", "8", "--max-concurrency", "2"]
    argv += ["--max-tokens", "7", "--ignore-eos", "--json", str(path)]
    before = server.service.scheduler.counts.finished
    assert main(argv) == 0
    assert server.service.scheduler.counts.finished == before + 7
    out, err = capsys.readouterr()
    assert re.search(r"Successful requests: +6\n", out)
    assert re.search(r"Accept length: +3\.00\n", out)
    assert f"asking {NAME} at {server.url}" in err
    found = json.loads(path.read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 42)
    assert found["total_input_tokens"] > 6 * 8
    assert found["max_concurrent_requests"] == 2
    assert found["itl_is_per_token"]
    assert found["model"] == NAME
    for request in found["requests"]:
        assert request["events"][-1][1] == 7
        assert (request["forwards"], request["following_tokens"]) == (2, 6)
        moments = [0.0, *(moment for moment, _ in request["events"]), request["ended"]]
        assert moments == sorted(moments)


def test_an_open_loop_does_not_wait_for_the_server(server):
    """The gaps are those of the seed, though nothing is answered until the last has begun."""
    server.runner.gate.clear()
    bodies = random_bodies("completions", 6, Lengths(4, 3), seed=1)
    traffic = Traffic(server.url, "completions", bodies, max_concurrency=None, request_rate=20.0)

    async def measure():
        async with Client(traffic) as client:
            await client.find_model(None)
            asyncio.get_running_loop().call_later(1.0, server.runner.gate.set)
            return await client.run()

    run = asyncio.run(measure())
    assert [outcome.error for outcome in run.outcomes] == [None] * 6
    gaps = random.Random(1)
    due = 0.0
    for outcome in run.outcomes:
        assert due <= outcome.started < due + 0.15
        assert outcome.started + outcome.ended > 0.9
        due += gaps.expovariate(20.0)


def test_a_request_that_fails_is_told_and_counted(server, capsys):
    argv = ["bench", "serving", "--base-url", server.url, "--num-prompts", "2"]
    assert main([*argv, "--extra-body", '{"top_p": 0}']) == 2
    assert "the first request failed, so none is measured: 400" in capsys.readouterr().err
    assert main([*argv, "--warmup-requests", "0", "--extra-body", '{"top_p": 0}']) == 1
    out, err = capsys.readouterr()
    assert re.search(r"Failed requests: +2\n", out)
    assert err.count("a request failed: 400: ") == 2
    assert main([*argv, "--model", "other"]) == 2
    assert f"served: {NAME}" in capsys.readouterr().err
    assert main(["bench", "serving", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    for flags in (["--extra-body", "[]"], ["--extra-body", "{"], ["--num-prompts", "0"],
                  ["--request-rate", "0"], ["--random-range-ratio", "2"]):  # fmt: skip
        assert main([*argv, *flags]) == 2


class Foreign(BaseHTTPRequestHandler):
    """A server that tells no usage, and of speculation in its metrics alone."""

    protocol_version = "HTTP/1.0"
    drafts = 0

    def do_GET(self):
        body = json.dumps({"data": [{"id": "m", "owned_by": "me"}]})
        if self.path == "/metrics":
            body = (
                f'other:spec_decode_num_drafts_total{{engine="0"}} {Foreign.drafts}.0\n'
                f'other:spec_decode_num_accepted_tokens_total{{engine="0"}} {3 * Foreign.drafts}\n'
            )
        self._send(body)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Foreign.drafts += 2
        text = "".join(f'data: {{"choices": [{{"text": "{c}"}}]}}\r\n\r\n' for c in "abc")
        self._send(text if asked["prompt"] == "cut" else text + "data: [DONE]\r\n\r\n")

    def _send(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def foreign():
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_143_another_server_that_tells_little(tmp_path, capsys):
    path = tmp_path / "in"
    path.write_text('{"prompt": "whole"}\n{"prompt": "cut"}\n')
    with foreign() as url:
        argv = ["bench", "serving", "--base-url", url, "--prompt-file", str(path)]
        assert main([*argv, "--json", str(tmp_path / "out")]) == 1
    found = json.loads((tmp_path / "out").read_text())
    assert (found["completed"], found["failed"]) == (1, 1)
    assert found["requests"][1]["error"] == "the stream ended without [DONE]"
    assert found["total_output_tokens"] == 3
    assert found["accept_length"] == 4
    assert "tells no usage" in capsys.readouterr().out


def test_the_command_line_asks_for_the_missing_package(monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "serving"]) == 3
    assert "pip install 'k26jax[bench]'" in capsys.readouterr().err
