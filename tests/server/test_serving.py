"""Slots under real requests: queue, aborts, slow readers, health, draining; nothing is lost."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
from scripted import events_of, ids_of, scripted

from k26jax.server.run import WebThread, bind, url_of
from k26jax.server.service import Service
from k26jax.server.settings import ServerSettings

LONG = [[token] for token in ids_of("x</think>" + "word " * 100)]


def long_answer(request):
    return LONG


def wait_for(condition, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.01)


def in_thread(call):
    """Starts a call; returns its thread and the list that its result goes to."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found


@pytest.fixture
def server():
    with scripted(long_answer, keepalive_seconds=0.1, max_waiting=2) as server:
        yield server
        server.runner.gate.set()
        server.wait_idle()
        assert server.runner.busy == []
        counts = server.service.scheduler.counts
        assert counts.submitted == counts.ended


def test_119_a_client_that_goes_frees_its_slot(server):
    """Before the first token, between tokens, and without streaming."""
    counts = server.service.scheduler.counts
    server.runner.pace = 0.01
    for case in ("first", "later", "whole"):
        aborted = counts.aborted
        other, found = in_thread(lambda: server.complete(max_tokens=40).json())
        wait_for(lambda: server.runner.busy)
        server.runner.gate.clear()
        if case == "whole":
            with pytest.raises(httpx.ReadTimeout):
                server.http.post(
                    "/v1/completions", json={"prompt": "b"}, timeout=httpx.Timeout(5, read=0.3)
                )
        else:
            body = {"prompt": "b", "stream": True}
            with server.http.stream("POST", "/v1/completions", json=body) as answer:
                chunks = answer.iter_raw()
                if case == "later":
                    server.runner.gate.set()
                    read = b""
                    while b"word" not in read:
                        read += next(chunks)
        server.runner.gate.set()
        other.join(10)
        assert found[0]["usage"]["completion_tokens"] == 40
        server.wait_idle()
        assert server.runner.busy == []
        assert counts.aborted == aborted + 1, case
    assert "k26jax_requests_aborted_total" in server.http.get("/metrics").text


def test_a_full_queue_is_429_and_whoever_waits_is_served_in_order(server):
    server.runner.gate.clear()
    firsts = [in_thread(lambda: server.complete(max_tokens=3)) for _ in range(2)]
    scheduler = server.service.scheduler
    wait_for(lambda: scheduler.running + scheduler.waiting == 2)
    more = []
    for number in range(2):
        more.append(in_thread(lambda: server.complete(max_tokens=3)))
        wait_for(lambda number=number: scheduler.running + scheduler.waiting == 3 + number)
    answer = server.complete()
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "queue_full"
    assert server.complete(n=3).status_code == 429
    # Bug 121: a full queue is no ill health.
    assert server.http.get("/health").status_code == 200
    server.runner.gate.set()
    for thread, found in firsts + more:
        thread.join(10)
        assert found[0].status_code == 200
    jobs = [call for call in server.runner.calls if call[0] == "prefill"]
    assert len(jobs) == 4
    text = server.http.get("/metrics").text
    assert 'k26jax_request_errors_total{code="queue_full",model_name="tiny"} 2.0' in text
    assert 'k26jax_request_success_total{finished_reason="length",model_name="tiny"} 4.0' in text
    assert 'k26jax_generation_tokens_total{model_name="tiny"} 12.0' in text
    assert 'k26jax_num_requests_running{model_name="tiny"} 0.0' in text


def test_who_came_first_is_served_first():
    begun = []

    def script(request):
        begun.append(request.prompt_token_ids[0])
        return LONG

    with scripted(script, slots=2, max_waiting=20) as server:
        scheduler = server.service.scheduler
        server.runner.gate.clear()
        asked = []
        for number in range(8):
            asked.append(
                in_thread(lambda number=number: server.complete(prompt=[number], max_tokens=5))
            )
            wait_for(lambda number=number: scheduler.running + scheduler.waiting == number + 1)
        server.runner.gate.set()
        for thread, found in asked:
            thread.join(10)
            assert found[0].status_code == 200
        assert begun == list(range(8))


def test_125_a_silent_stream_is_kept_alive_by_comments(server):
    server.runner.gate.clear()
    thread, found = in_thread(lambda: server.complete(stream=True, max_tokens=3).content)
    time.sleep(0.5)
    server.runner.gate.set()
    thread.join(10)
    assert found[0].count(b": keepalive\n\n") >= 2
    assert len(events_of(found[0])) >= 2


def test_requests_are_aborted_by_either_id(server):
    server.runner.pace = 0.02
    for by in ("id", "x-request-id", None):
        body = {"prompt": "a", "stream": True, "n": 2}
        headers = {"x-request-id": "mine"}
        stream = server.http.stream("POST", "/v1/completions", json=body, headers=headers)
        with stream as answer:
            lines = answer.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            id = json.loads(first.removeprefix("data: "))["id"]
            asked = {"rid": id if by == "id" else "mine"} if by else {"abort_all": True}
            done = server.http.post("/abort_request", json=asked).json()
            assert done == {"aborted": 2}
            rest = "\n".join([first, *lines]) + "\n"
        events = [json.loads(event) for event in events_of(rest.encode())]
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert reasons.count("abort") == 2
        server.wait_idle()
    assert server.http.post("/abort_request", json={"rid": "none"}).status_code == 404
    for bad in ({}, {"rid": "a", "abort_all": True}, {"rid": 3}):
        assert server.http.post("/abort_request", json=bad).status_code == 400


def test_135_a_slow_reader_does_not_stall_another(server):
    with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as one:
        slow = one.iter_raw()
        next(slow)
        begun = time.monotonic()
        assert server.complete(max_tokens=50).status_code == 200
        assert time.monotonic() - begun < 5
        rest = b"".join(slow)
    assert rest.endswith(b"data: [DONE]\n\n")


def test_streams_take_few_steps_a_dispatch(server):
    server.complete(stream=True, max_tokens=20)
    assert {call[1] for call in server.runner.calls if call[0] == "run"} == {1}
    server.runner.calls.clear()
    server.complete(max_tokens=20)
    steps = server.llm.config.steps_per_dispatch
    assert {call[1] for call in server.runner.calls if call[0] == "run"} == {steps}


def test_a_long_prompt_goes_in_chunk_by_chunk_between_the_steps_of_others(server):
    size = server.llm.config.chunked_prefill_size
    with scripted(long_answer, context=4 * size, keepalive_seconds=0.1) as server:
        server.runner.pace = 0.01
        other = in_thread(lambda: server.complete(stream=True, max_tokens=80))
        wait_for(lambda: len(server.runner.calls) > 3)
        answer = server.complete(prompt=[5] * (3 * size - 1), max_tokens=2)
        assert answer.json()["usage"]["prompt_tokens"] == 3 * size - 1
        other[0].join(10)
        calls = [name for name, _ in server.runner.calls]
        first = calls.index("prefill", 1)
        assert calls[first : first + 5] == ["prefill", "run"] * 2 + ["prefill"]
        # One that is left within its prompt frees its slot before its first token.
        server.runner.gate.clear()
        body = {"prompt": [5] * (3 * size - 1), "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body):
            wait_for(lambda: server.runner.busy)
        wait_for(lambda: server.service.scheduler._aborted)
        calls = len(server.runner.calls)
        server.runner.gate.set()
        server.wait_idle()
        assert server.runner.busy == []
        assert [name for name, _ in server.runner.calls[calls:]] == ["release"]
        assert server.complete(max_tokens=2).status_code == 200


def test_an_idle_loop_sleeps(server):
    server.complete(max_tokens=2)
    server.wait_idle()
    scheduler, turns = server.service.scheduler, []
    check = scheduler._check_idle  # made before each wait
    scheduler._check_idle = lambda slots: turns.append(1) or check(slots)
    calls = len(server.runner.calls)
    time.sleep(0.3)
    assert len(turns) == 0
    assert len(server.runner.calls) == calls


def test_121_a_server_that_starts_tells_how_far_it_is():
    service = Service(ServerSettings(served_names=("tiny",)))
    sock = bind("127.0.0.1", 0)
    web = WebThread(service, sock)
    web.start()
    try:
        service.stage, service.percent = "load target", 41.5
        with httpx.Client(base_url=url_of(sock), trust_env=False) as http:
            ready = http.get("/ready")
            assert ready.status_code == 503
            assert ready.json() == {"ready": False, "stage": "load target", "percent": 41.5}
            assert http.get("/health").status_code == 200
            answer = http.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert "load target" in answer.json()["error"]["message"]
            assert http.get("/server_info").status_code == 503
            assert http.get("/metrics").status_code == 200
    finally:
        assert service.drain(0)
        web.stop()
    assert not web.is_alive


def test_121_an_engine_that_fails_ends_what_runs_and_is_unhealthy():
    with scripted(long_answer) as server:
        server.runner.gate.clear()
        whole = in_thread(lambda: server.complete())
        streamed = in_thread(lambda: server.chat(stream=True))
        waits = in_thread(lambda: server.complete())
        scheduler = server.service.scheduler
        wait_for(lambda: scheduler.running + scheduler.waiting == 3)
        server.runner.error = ValueError("the device is on fire")
        server.runner.gate.set()
        for thread, _ in (whole, streamed, waits):
            thread.join(10)
        for _, found in (whole, waits):
            assert found[0].status_code == 500
            assert found[0].json()["error"]["code"] == "engine_error"
            assert "fire" not in found[0].text
        assert streamed[1][0].status_code == 200
        events = events_of(streamed[1][0].content)
        assert json.loads(events[-1])["error"]["code"] == "engine_error"
        health = server.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "the engine has failed"})
        assert server.http.get("/ready").json()["stage"] == "failed"
        assert server.complete().status_code == 500
        assert server.runner.busy == []
        counts = scheduler.counts
        assert (counts.failed, counts.submitted) == (3, 3)


def test_121_a_call_of_the_device_that_hangs_is_unhealthy():
    with scripted(long_answer, stall_seconds=0.2) as server:
        server.runner.gate.clear()
        thread, _ = in_thread(lambda: server.complete(max_tokens=2))
        wait_for(lambda: server.http.get("/health").status_code == 503, 5)
        assert server.http.get("/ready").status_code == 503
        server.runner.gate.set()
        thread.join(10)
        assert server.http.get("/health").status_code == 200


def test_142_draining_ends_what_runs_and_takes_nothing_new(server):
    server.runner.gate.clear()
    streams = [in_thread(lambda: server.complete(stream=True, max_tokens=30)) for _ in range(2)]
    scheduler = server.service.scheduler
    wait_for(lambda: scheduler.running + scheduler.waiting == 2)
    thread, done = in_thread(lambda: server.service.drain(10))
    wait_for(lambda: server.service.stage == "draining")
    wait_for(lambda: not scheduler.is_open)
    refused = server.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"] == "1"
    assert server.http.get("/ready").status_code == 503
    assert server.http.get("/health").status_code == 200
    server.runner.gate.set()
    thread.join(10)
    assert done == [True]
    for stream, found in streams:
        stream.join(10)
        events = [json.loads(event) for event in events_of(found[0].content)]
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_142_what_does_not_end_in_time_is_aborted(server):
    server.runner.gate.clear()
    stream, found = in_thread(lambda: server.complete(stream=True))
    wait_for(lambda: server.service.scheduler.running == 1)
    thread, done = in_thread(lambda: server.service.drain(0.1))
    time.sleep(0.3)
    server.runner.gate.set()
    thread.join(10)
    stream.join(10)
    assert done == [False]
    events = [json.loads(event) for event in events_of(found[0].content)]
    assert events[-1]["choices"][0]["finish_reason"] == "abort"


def test_the_llm_is_busy_while_it_is_served(server):
    from k26jax import SamplingParams
    from k26jax.errors import RequestError

    with pytest.raises(RequestError, match="another run"):
        server.llm.generate("a", SamplingParams(max_tokens=1))


def test_141_timing_of_an_answer(server):
    answer = server.complete(max_tokens=5)
    parts = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(parts) == ["queue", "prefill", "decode"]
    assert all(float(value) >= 0 for value in parts.values())
