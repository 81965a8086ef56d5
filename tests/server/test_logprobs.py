"""Log-probabilities in both routes' forms, of the tokens that are shown; a scripted engine."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import events_of, ids_of, prepared, scripted, told_of

ANSWER = "thought </think>\n\nHello wörld 😀 stop it 中<|im_end|>"


@pytest.fixture(scope="module")
def server():
    state = {"runs": []}
    with scripted(lambda request: state["runs"]) as server:
        server.state = state
        yield server


def runs_of(ids, cuts) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for place, token in enumerate(ids):
        runs[-1].append(token)
        if cuts[place % len(cuts)]:
            runs.append([])
    return runs


def entry(position: int, token: int, count: int) -> dict:
    """What a chat tells of a token, by what the script says of it."""
    tokenizer = prepared(2, 512).tokenizer
    chosen, _, ids, top = told_of(position, token)

    def shown(id, value):
        raw = tokenizer.token_bytes(id)
        value = max(value, -9999.0)
        return {"token": raw.decode("utf-8", "replace"), "logprob": value, "bytes": list(raw)}

    likely = [shown(*item) for item in zip(ids, top, strict=True)][:count]
    return shown(token, chosen) | {"top_logprobs": likely}


def beginning(ids: list[int], texts: list[str]) -> list[list[int]]:
    """For pieces of the visible text in order: positions of the tokens that begin in each."""
    tokenizer = prepared(2, 512).tokenizer
    starts, raw = [], b""
    for token in ids:
        starts.append(len(raw))
        raw += tokenizer.token_bytes(token)
    found = []
    for text in texts:
        first = raw.index(text.encode())
        inside = range(first, first + len(text.encode()))
        found.append([place for place, start in enumerate(starts) if start in inside])
    return found


def streamed(server, call, **asked) -> list[dict]:
    """The pieces of the first choice of a stream."""
    raw = call(stream=True, **asked).content
    return [json.loads(event)["choices"][0] for event in events_of(raw)]


@settings(max_examples=40)
@given(
    cuts=st.lists(st.booleans(), min_size=1, max_size=9),
    stop=st.sampled_from([None, "stop", "örl", "ht", "Hello"]),
    count=st.sampled_from([None, 0, 2, 3]),
)
def test_66_a_chat_tells_of_what_it_shows_however_tokens_come(server, cuts, stop, count):
    ids = ids_of(ANSWER)
    server.state["runs"] = runs_of(ids, cuts)
    asked = {"logprobs": True, "stop": stop, "max_tokens": 200}
    asked |= {} if count is None else {"top_logprobs": count}
    choice = server.chat(**asked).json()["choices"][0]
    message, told = choice["message"], choice["logprobs"]
    texts = [message["reasoning_content"] or "", message["content"]]
    thoughts, content = beginning(ids, texts)
    assert told["content"] == [entry(p, ids[p], count or 0) for p in content]
    assert told["reasoning_content"] == [entry(p, ids[p], count or 0) for p in thoughts]
    raw = b"".join(bytes(item["bytes"]) for item in told["content"])
    assert raw.decode("utf-8", "replace").startswith(message["content"])
    if stop is None:
        assert raw.decode() == message["content"] == "\n\nHello wörld 😀 stop it 中"
    pieces = streamed(server, server.chat, **asked)
    for name in ("content", "reasoning_content"):
        parts = [(piece["logprobs"] or {}).get(name) or [] for piece in pieces]
        assert [item for part in parts for item in part] == told[name]
    for piece in pieces:
        is_text = {"content", "reasoning_content"} & piece["delta"].keys()
        assert (piece["logprobs"] is not None) == bool(is_text and "role" not in piece["delta"])


@settings(max_examples=40)
@given(
    cuts=st.lists(st.booleans(), min_size=1, max_size=9),
    stop=st.sampled_from([None, "stop", "örl", "lo w", "\n", "Hello"]),
    count=st.sampled_from([0, 1, 3]),
)
def test_a_completion_tells_of_what_it_shows(server, cuts, stop, count):
    ids = ids_of(ANSWER.replace("</think>", ""))
    server.state["runs"] = runs_of(ids, cuts)
    asked = {"logprobs": count, "stop": stop, "max_tokens": 200}
    choice = server.complete(**asked).json()["choices"][0]
    text, told = choice["text"], choice["logprobs"]
    (shown,) = beginning(ids, [text])
    assert told["token_logprobs"] == [told_of(p, ids[p])[0] for p in shown]
    assert len(told["tokens"]) == len(told["top_logprobs"]) == len(told["text_offset"])
    assert len(told["tokens"]) == len(shown)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        whole = token.startswith("bytes:\\x") or text[offset:].startswith(token)
        assert whole or offset == told["text_offset"][-1], token  # the stop string may cut the last
    for place, (position, likely) in enumerate(zip(shown, told["top_logprobs"], strict=True)):
        assert len(likely) in (count, count + 1)
        assert likely[told["tokens"][place]] == told["token_logprobs"][place]
        assert len(likely) == len({ids[position], *told_of(position, ids[position])[2][:count]})
    pieces = streamed(server, server.complete, **asked)
    for name, values in told.items():
        parts = [piece["logprobs"][name] for piece in pieces if piece["logprobs"]]
        assert [item for part in parts for item in part] == values
    assert "".join(piece["text"] for piece in pieces) == text


def test_parts_of_characters_have_names_of_their_own(server):
    """The tokens of 中 are bytes; as text they would all be the same mark."""
    ids = ids_of("中")
    assert len(ids) > 1
    server.state["runs"] = [ids]
    told = server.complete(logprobs=0, max_tokens=len(ids)).json()["choices"][0]["logprobs"]
    assert all(name.startswith("bytes:\\x") for name in told["tokens"])
    assert told["text_offset"] == [0] * len(ids)


def test_without_being_asked_nothing_is_told(server):
    server.state["runs"] = [ids_of(ANSWER)]
    for body in ({}, {"logprobs": None}, {"logprobs": False, "top_logprobs": 0}):
        assert server.chat(**body).json()["choices"][0]["logprobs"] is None
    assert server.complete().json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("call", "body", "param", "words"),
    [
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "0 to 20"),
        ("chat", {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ("chat", {"logprobs": 3}, "logprobs", "boolean"),
        ("complete", {"logprobs": 21}, "logprobs", "0 to 20"),
        ("complete", {"logprobs": True}, "logprobs", "integer"),
        ("complete", {"logprobs": 1, "echo": True}, "logprobs", "echo"),
        ("chat", {"presence_penalty": 2.1}, "presence_penalty", "-2.0 to 2.0"),
        ("chat", {"frequency_penalty": -3}, "frequency_penalty", "-2.0 to 2.0"),
        ("chat", {"repetition_penalty": 0}, "repetition_penalty", "0.01 to 100"),
        ("chat", {"logit_bias": {"5": 101}}, "logit_bias[5]", "-100.0 to 100.0"),
        ("chat", {"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
        ("chat", {"logit_bias": {"99999": 1}}, "logit_bias", "outside the vocabulary"),
        ("chat", {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300"),
        ("chat", {"min_tokens": -1}, "min_tokens", "0 to"),
        ("chat", {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "exceeds max_tokens = 4"),
        ("chat", {"bad_words": [""]}, "bad_words", "list of words"),
        ("chat", {"bad_words": ["é中" * 20]}, "bad_words", "at most 16"),
        ("chat", {"bad_words": [f"w{i}" for i in range(65)]}, "bad_words", "at most 64"),
    ],
)
def test_bad_values_name_their_field(server, call, body, param, words):
    answer = getattr(server, call)(**body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"], error


def test_all_fields_reach_the_engine(server):
    asked = {
        "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "7": 2.5}, "min_tokens": 3, "bad_words": ["import"],
    }  # fmt: skip
    seen = []
    script = server.runner.script
    server.state["runs"] = [ids_of(ANSWER)]
    server.runner.script = lambda request: seen.append(request) or server.state["runs"]
    try:
        for call in (server.chat, server.complete):
            assert call(**asked).status_code == 200
    finally:
        server.runner.script = script
    for request in seen:
        params = request.params
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1)
        assert (params.repetition_penalty, params.min_tokens) == (1.5, 3)
        assert params.biases == {5: -100.0, 7: 2.5}
        texts = [prepared(2, 512).tokenizer.decode(ids) for ids in request.bad_words]
        assert texts in (["import"], ["import", " import"])
        assert request.adjusts
    assert len(seen) == 2
