"""The public bug reports on servers: what no other test shows, and that each has its test."""

from __future__ import annotations

import json
import logging
import re
import time

import pytest
from fixtures.paths import REPOSITORY
from scripted import ids_of, scripted

from k26jax.server.fields import CHAT, COMPLETION, HONOURED
from k26jax.server.logs import LOG

OF_SERVERS = {
    111, 113, 114, 115, 117, 118, 119, 121, 122, 123, 125, 126, 127, 129, 130, 131, 133, 134, 135,
    137, 138, 139, 141, 142, 143, 145,
}  # fmt: skip
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
STREAM, LOGPROBS, TOOLS = {"stream": True}, {"logprobs": True}, {"tools": [TOOL]}
# By field, a value, and what has to be there with and without it.
PROBES: dict[str, tuple[object, dict]] = {
    "model": ("second", {}), "max_tokens": (2, {}), "temperature": (0.5, {}), "top_p": (0.5, {}),
    "top_k": (3, {}), "min_p": (0.1, {}), "seed": (7, {}), "n": (2, {}), "stop": ("b", {}),
    "stop_token_ids": ([5], {}), "min_tokens": (2, {}), "presence_penalty": (0.5, {}),
    "frequency_penalty": (0.5, {}), "repetition_penalty": (1.5, {}), "bad_words": (["import"], {}),
    "logit_bias": ({"5": 1}, {}), "ignore_eos": (True, {}), "skip_special_tokens": (False, {}),
    "include_stop_str_in_output": (True, {"stop": "b"}), "stream": (True, {}),
    "stream_options": ({"include_usage": True}, STREAM), "draft_trees": (True, STREAM),
    "response_format": ({"type": "json_object"}, {}), "structured_outputs": ({"regex": "a"}, {}),
}  # fmt: skip
CHAT_PROBES = {
    "messages": ([USER, USER], {}), "max_completion_tokens": (2, {}), "logprobs": (True, {}),
    "top_logprobs": (2, LOGPROBS), "tools": ([TOOL], {}), "tool_choice": ("required", TOOLS),
    "parallel_tool_calls": (False, TOOLS), "thinking": ({"type": "disabled"}, {}),
    "chat_template_kwargs": ({"thinking": False}, {}), "reasoning_effort": ("none", {}),
}  # fmt: skip
COMPLETION_PROBES = {"prompt": ("b", {}), "echo": (True, {}), "logprobs": (2, {})}


def test_every_entry_has_a_test_named_after_it():
    found: set[int] = set()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        for numbers in re.findall(r"def test_(?:bug_)?((?:\d+_)+)", path.read_text()):
            found.update(int(number) for number in numbers.split("_") if number)
    assert found >= OF_SERVERS


@pytest.fixture(scope="module")
def server():
    script = [ids_of("a</think>b c<|im_end|>")]
    names = ("tiny", "second")
    with scripted(lambda request: script, served_names=names, draft_trees=True) as server:
        yield server


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
def test_30_every_honoured_field_changes_what_is_asked_or_answered(server, kind):
    probes = PROBES | (CHAT_PROBES if kind == CHAT else COMPLETION_PROBES)
    assert probes.keys() == HONOURED[kind].keys()
    ask = server.chat if kind == CHAT else server.complete
    seen: list = []
    script = server.runner.script
    server.runner.script = lambda request: seen.append(request) or script(request)

    def told(body: dict) -> tuple[str, str]:
        seen.clear()
        answer = ask(**body)
        assert answer.status_code == 200, answer.text
        text = re.sub(r'"id":"[^"]*"|"created":\d+', "", answer.text)
        asked = [(r.prompt_token_ids, r.params, r.stop_ids, r.bad_words) for r in seen]
        return repr(asked), text

    try:
        for name, (value, beside) in probes.items():
            without = told(beside)
            assert without == told(beside), "this test tells nothing where answers vary"
            assert told(beside | {name: value}) != without, name
    finally:
        server.runner.script = script


def test_117_seeds_at_the_borders(server):
    for seed in (0, -1, (1 << 63) - 1, -(1 << 63)):
        assert server.complete(seed=seed, n=2).status_code == 200, seed
    error = server.complete(seed=1 << 64).json()["error"]
    assert (error["param"], error["type"]) == ("seed", "invalid_request_error")


def test_131_a_memory_error_of_the_device_ends_its_requests_and_says_so():
    """Slots hold whole contexts and programs have their room, so this is a fault, not a limit."""
    script = [ids_of("</think>b<|im_end|>")]
    with scripted(lambda request: script) as server:
        server.runner.error = MemoryError("RESOURCE_EXHAUSTED: out of memory while 16 GB")
        error = server.complete()
        assert (error.status_code, error.json()["error"]["code"]) == (500, "engine_error")
        assert "RESOURCE" not in error.text
        assert server.runner.busy == []
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/version").status_code == 200


def test_137_no_key_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(LOG, "propagate", True)
    script = [ids_of("</think>b<|im_end|>")]
    with (
        caplog.at_level(logging.DEBUG, logger="k26jax"),
        scripted(lambda request: script, api_keys=("right-key",)) as server,
    ):
        for key in ("right-key", "wrong-key"):
            headers = {"authorization": f"Bearer {key}"}
            server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            server.http.get("/server_info", headers=headers)
    assert len(caplog.records) >= 4
    told = [f"{r.getMessage()} {r.args} {r.__dict__.get('fields')}" for r in caplog.records]
    assert not any("-key" in line for line in told)


def samples(server) -> dict[str, float]:
    lines = server.http.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_141_counters_only_grow_and_a_clock_that_jumps_does_no_harm(server, monkeypatch):
    """Scraped while requests run, with a clock that goes back an hour at each look."""
    clock = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    before = samples(server)
    for _ in range(3):
        server.runner.gate.clear()
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", **STREAM}) as one:
            during = samples(server)
            server.runner.gate.set()
            one.read()
        server.wait_idle()
        after = samples(server)
        for name, value in after.items():
            if re.search(r"_(total|bucket|sum|count)\b", name):
                assert value >= during.get(name, 0.0) >= before.get(name, 0.0) >= 0, name
        before = after
    assert json.dumps(after).count("e2e_request_latency_seconds_bucket")
    assert 0 < after['k26jax_e2e_request_latency_seconds_sum{model_name="tiny"}'] < 60
