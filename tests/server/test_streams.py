"""A scripted engine behind the real server: the same answer for every split, streamed or not."""

from __future__ import annotations

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import NAME, events_of, ids_of, scripted

CALL = (
    "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
    '{"query": "é😀"}<|tool_call_end|>'
)
SECTION = f"<|tool_calls_section_begin|>{CALL}<|tool_calls_section_end|>"
TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"properties": {"query": {"type": "string"}}}},
}
ANSWER = "thought </think>\n\nHello wörld 😀 stop it"
ANSWERS = st.sampled_from(
    [
        ANSWER + "<|im_end|>",
        f"thought</think>Hello{SECTION}<|im_end|>",
        f"{SECTION}<|im_end|>",
        "no end of thoughts, and no end of turn either " * 3,
        "x</think>" + "y" * 30 + "<|im_end|>",
    ]
)


@pytest.fixture(scope="module")
def server():
    state = {"runs": []}
    with scripted(lambda request: state["runs"]) as server:
        server.state = state
        yield server


def runs_of(ids: list[int], cuts: list[bool]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for place, token in enumerate(ids):
        runs[-1].append(token)
        if cuts[place % len(cuts)]:
            runs.append([])
    return runs


def joined(events: list[dict], index: int = 0) -> dict:
    """What a client makes of a stream's chunks: the choice as without streaming."""
    message: dict = {"content": None, "reasoning_content": None}
    choice: dict = {"index": index, "message": message}
    for event in events:
        for piece in event["choices"]:
            if piece["index"] != index:
                continue
            delta = piece["delta"]
            message["role"] = delta.get("role") or message["role"]
            for name in ("content", "reasoning_content"):
                if name in delta:
                    message[name] = (message[name] or "") + delta[name]
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": {}})
                    calls[-1]["function"] = dict(call["function"])
                else:
                    assert call.keys() == {"index", "function"}
                    found = calls[call["index"]]["function"]
                    found["arguments"] += call["function"]["arguments"]
            if piece["finish_reason"] is not None:
                assert "finish_reason" not in choice
                choice |= {n: piece[n] for n in ("finish_reason", "matched_stop", "logprobs")}
    if message.get("tool_calls"):
        message["content"] = message["content"] or None
    return choice


@settings(max_examples=30)
@given(
    text=ANSWERS,
    cuts=st.lists(st.booleans(), min_size=1, max_size=11),
    stop=st.sampled_from([None, "stop", ["k>\n", "hought"], ["ö"]]),
    include=st.booleans(),
    limit=st.sampled_from([3, 11, 200]),
    tools=st.booleans(),
)
def test_every_split_gives_the_same_answer_streamed_or_not(
    server, text, cuts, stop, include, limit, tools
):
    """Bugs 33, 34, 35, 37, 42: text, thoughts, calls, usage and reason do not depend on runs."""
    ids = ids_of(text)
    asked = {"stop": stop, "include_stop_str_in_output": include, "max_tokens": limit}
    asked |= {"tools": [TOOL]} if tools else {}
    bodies = []
    for runs in ([ids], runs_of(ids, cuts), [[token] for token in ids]):
        server.state["runs"] = runs
        whole = server.chat(**asked).json()
        options = {"include_usage": True}
        raw = server.chat(stream=True, stream_options=options, **asked).content
        events = [json.loads(event) for event in events_of(raw)]
        assert joined(events[:-1]) == whole["choices"][0]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]
        assert events[-1]["k26jax"] == whole["k26jax"]
        generated, forwards = whole["usage"]["completion_tokens"], whole["k26jax"]
        assert forwards["accept_length"] == pytest.approx(
            (generated - 1) / max(forwards["target_forwards"], 1), abs=1e-3
        )
        bodies.append((whole["choices"], whole["usage"]))
    assert bodies[0] == bodies[1] == bodies[2]
    usage = bodies[0][1]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] <= min(limit, len(ids) + 1)
    if tools and SECTION in text and stop is None and limit == 200:
        message = bodies[0][0][0]["message"]
        assert bodies[0][0][0]["finish_reason"] == "tool_calls"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"query": "é😀"}
        assert message["tool_calls"][0]["id"] == "functions.search:0"
    server.wait_idle()
    assert server.runner.busy == []


def test_the_bytes_of_a_stream(server):
    ids = ids_of("a</think>\n\nHi\nthére<|im_end|>")
    server.state["runs"] = [ids]
    answer = server.chat(stream=True)
    assert "thére" in answer.content.decode("utf-8")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    events = [json.loads(event) for event in events_of(answer.content)]
    shared = ("id", "object", "created", "model", "system_fingerprint")
    assert len({tuple(event[name] for name in shared) for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert (events[0]["model"], events[0]["id"][:9]) == (NAME, "chatcmpl-")
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [event["choices"][0]["delta"] for event in events[1:]]
    assert deltas == [{"reasoning_content": "a"}, {"content": "\n\nHi\nthére"}, {}]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None, None, None, "stop"]
    assert all("usage" not in event for event in events)


def test_one_event_a_step(server):
    ids = ids_of("</think>one two three four five six<|im_end|>")
    server.state["runs"] = [ids[:2], ids[2:5], ids[5:6], ids[6:]]
    events = [json.loads(event) for event in events_of(server.chat(stream=True).content)]
    texts = [event["choices"][0]["delta"].get("content") for event in events[1:-1]]
    assert 3 <= len([text for text in texts if text]) <= 5
    assert "".join(text or "" for text in texts) == "one two three four five six"


def test_118_usage_comes_last_and_only_if_asked_for(server):
    server.state["runs"] = [ids_of("ab</think>c<|im_end|>")]
    options = {"include_usage": True, "continuous_usage_stats": True}
    raw = server.chat(stream=True, stream_options=options).content
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events_of(raw)]
    assert counts == sorted(counts)
    assert counts[-1] == len(server.state["runs"][0])
    raw = server.chat(stream=True, stream_options={"include_usage": False}).content
    assert all("usage" not in json.loads(event) for event in events_of(raw))


def test_134_n_gives_as_many_choices_and_one_prompt(server):
    server.state["runs"] = runs_of(ids_of("t</think>same for all<|im_end|>"), [True, False])
    body = server.chat(n=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    one = server.chat(n=1).json()
    assert body["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    events = [json.loads(event) for event in events_of(server.chat(n=3, stream=True).content)]
    assert [joined(events, index) for index in range(3)] == body["choices"]
    openings = [event["choices"][0] for event in events[:3]]
    assert [(c["index"], c["delta"]["role"]) for c in openings] == [
        (index, "assistant") for index in range(3)
    ]


def test_a_completion_of_several_prompts_with_echo(server):
    server.state["runs"] = [ids_of(" one"), ids_of(" two")]
    ids = ids_of("import os")
    body = server.complete(prompt=["import", "é"], n=2, echo=True, max_tokens=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["import one two"] * 2 + [
        "é one two"
    ] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 8
    raw = server.complete(prompt=[ids], echo=True, max_tokens=2, stream=True).content
    events = [json.loads(event) for event in events_of(raw)]
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == "import os one two"
    assert {event["object"] for event in events} == {"text_completion"}
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_39_stop_strings_and_ids(server):
    ids = ids_of("</think>one END two<|im_end|>")
    server.state["runs"] = [ids]
    found = server.chat(stop=["END"]).json()["choices"][0]
    assert (found["message"]["content"], found["matched_stop"]) == ("one ", "END")
    token = ids[3]
    found = server.chat(stop_token_ids=[token]).json()["choices"][0]
    assert (found["finish_reason"], found["matched_stop"]) == ("stop", token)
    found = server.chat(stop="END", include_stop_str_in_output=True).json()["choices"][0]
    assert found["message"]["content"] == "one END"
    for bad in ("", [], ["a"] * 17, [""]):
        answer = server.chat(stop=bad)
        assert answer.status_code == (200 if bad == [] else 400), bad


def test_calls_of_tools_reach_the_official_client(server):
    ids = ids_of(f"thought</think>{SECTION}<|im_end|>")
    server.state["runs"] = runs_of(ids, [False, True, False])
    asked = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            types = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0]
        (call,) = whole.message.tool_calls
        assert (call.id, call.function.name) == ("functions.search:0", "search")
        assert json.loads(call.function.arguments) == {"query": "é😀"}
        assert whole.finish_reason == streamed.finish_reason == "tool_calls"
        assert whole.message.content is None
        assert whole.message.reasoning_content == "thought"
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        assert "tool_calls.function.arguments.done" in types
        # The history with the call and its result is taken back.
        result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
        more = [*asked["messages"], whole.message.model_dump(exclude_none=True), result]
        again = client.chat.completions.create(**(asked | {"messages": more})).choices[0]
        assert again.finish_reason == "tool_calls"
