"""What is refused, and how: statuses, error objects, keys, sizes; the server lives on."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import NAME, ids_of, scripted

from k26jax.server import logs
from k26jax.server.fields import CHAT, COMPLETION, HONOURED, IGNORED, REFUSED, fields_table

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def server():
    with scripted(lambda request: [ids_of("a</think>b<|im_end|>")], context=64) as server:
        yield server


def error_of(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert "detail" not in body
    return body["error"]


def schema(content: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": content}}


TOOL = {"type": "function", "function": {"name": "search"}}
BAD_TOOL = {"type": "function", "function": {"name": "b", "parameters": {"type": "objct"}}}
NAMED = {"type": "function", "function": {"name": "serch"}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "should be a number"),
        ({"temperature": 200}, "temperature", "0.0 to 100.0"),
        ({"temperature": True}, "temperature", "should be a number"),
        ({"top_p": 0}, "top_p", "set temperature = 0"),
        ({"n": 0}, "n", "1 to 128"),
        ({"n": 1000}, "n", "1 to 128"),
        ({"n": 17}, "n", "17 sequences"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "differ"),
        ({"stop": 3}, "stop", "wrong type"),
        ({"stop": [""]}, "stop[0]", ""),
        ({"seed": 1 << 70}, "seed", "integer"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "outside the vocabulary"),
        ({"messages": []}, "messages", ""),
        ({"messages": "hi"}, "messages", ""),
        ({"messages": None}, "messages", ""),
        ({"messages": [USER, {"role": "robot"}]}, "messages[1].role", "'robot'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "",
        ),
        ({"tools": {}}, "tools", "expected a list"),
        ({"tools": [{"type": "x"}]}, "tools[0]", "only the type function"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "expected"),
        ({"tool_choice": "any"}, "tool_choice", '"required"'),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "did you mean 'search'"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": schema({"type": "objct"})}, "response_format", "objct"),
        ({"response_format": schema({"not": {}})}, "response_format", '["not"]'),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "both",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "did you mean 'regex'"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "end token"),
        (
            {"tools": [TOOL, BAD_TOOL], "tool_choice": "required"},
            "tools[1].function.parameters",
            "objct",
        ),
        ({"thinking": True}, "thinking", "enabled"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "expected one of"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
        ({"stream": "yes"}, "stream", "boolean"),
    ],
)
def test_114_129_134_bad_values_name_their_field(server, body, param, message):
    for stream in ({}, {"stream": True}):  # no stream begins either
        error = error_of(server.chat(**(stream | body)))
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error
        assert message in error["message"]


def test_a_server_without_grammars_refuses_shapes_by_name():
    with scripted(lambda request: [], shapes_answers=False) as server:
        for body in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"regex": "a"}},
            {"tool_choice": "required", "tools": [TOOL]},
            {"parallel_tool_calls": False, "tools": [TOOL]},
        ):
            error = error_of(server.chat(**body))
            assert (error["param"], error["code"]) == (next(iter(body)), "unsupported_parameter")
            assert "--grammar-backend none" in error["message"]
        error = error_of(server.complete(response_format={"type": "json_object"}))
        assert error["param"] == "response_format"


def test_options_of_a_stream_without_one(server):
    error = error_of(server.chat(stream_options={"include_usage": True}))
    assert "without stream" in error["message"]


@pytest.mark.parametrize("kind", [CHAT, COMPLETION])
def test_every_refused_field_is_refused_by_name_and_takes_what_asks_for_nothing(server, kind):
    ask = server.chat if kind == CHAT else server.complete
    for name, refused in REFUSED[kind].items():
        error = error_of(ask(**{name: {"x": 1}}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        for value in (None, *refused.allowed):
            assert ask(**{name: value}).status_code == 200, (name, value)
    assert ask(**{name: {"a": "b"} for name in IGNORED}).status_code == 200
    assert ask(**{n: None for n in HONOURED[kind] if n not in ("messages", "prompt")}).is_success


def test_unknown_fields_are_refused_with_the_nearest(server):
    error = error_of(server.chat(temprature=1))
    assert error["code"] == "unsupported_parameter"
    assert "did you mean 'temperature'" in error["message"]
    script = [ids_of("</think>a<|im_end|>")]
    with scripted(lambda request: script, refuses_unknown=False) as lenient:
        answer = lenient.chat(temprature=1, **{"ä\n": 2})
        assert answer.status_code == 200
        assert answer.headers["x-k26jax-ignored"] == "temprature,??"


@pytest.mark.parametrize("prompt", ["", [], [[]], None, {"a": 1}, ["a", 1], [-1], [99999]])
def test_111_empty_and_bad_prompts(server, prompt):
    error = error_of(server.complete(prompt=prompt))
    assert error["type"] == "invalid_request_error"
    assert server.complete().status_code == 200


def test_113_115_what_does_not_fit_in_the_context_is_refused_with_the_numbers(server):
    for stream in (False, True):
        for count, limit, status in ((63, 1, 200), (63, 2, 400), (64, 1, 400), (65, None, 400)):
            answer = server.complete(prompt=[5] * count, max_tokens=limit, stream=stream)
            assert answer.status_code == status, (count, limit)
            if status == 400:
                error = error_of(answer)
                assert error["code"] == "context_length_exceeded"
                numbers = {str(count), "64"} | ({str(limit)} if limit else set())
                assert all(number in error["message"] for number in numbers), error


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"3", b'"x"', b"null", b'{"n": NaN}', b'{"n": Infinity}', b"\xff\xfe",
     b'{"n": ' + b"9" * 5000 + b"}", b'{"messages": ' + b"[" * 100_000],
)  # fmt: skip
def test_139_bodies_that_are_no_json_object(server, raw):
    error = error_of(server.http.post("/v1/chat/completions", content=raw, headers=JSON))
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    "shape",
    [
        {"regex": "a\ud83d"},
        {"choice": ["a\ud83d"]},
        {"json": {"const": "a\ud83d"}},
        {"grammar": 'start: "a\ud83d"'},
        {"grammar": '{"grammars": [{"lark_grammar": "start: \ud83d"}]}'},
    ],
)
def test_shapes_with_half_a_surrogate_pair(server, shape):
    raw = json.dumps({"prompt": "a", "structured_outputs": shape})
    error = error_of(server.http.post("/v1/completions", content=raw, headers=JSON))
    assert "half of a surrogate pair" in error["message"]
    assert error["param"].startswith("structured_outputs")


def test_long_numbers(server):
    """Python turns no more than 4300 digits into a number."""
    answer = server.http.post(
        "/v1/completions", json={"prompt": "a", "logit_bias": {"9" * 5000: 1}}
    )
    assert error_of(answer)["param"] == "logit_bias"
    raw = '{"prompt": "a", "seed": %s}' % ("9" * 4000)
    answer = server.http.post("/v1/completions", content=raw, headers=JSON)
    error = error_of(answer)
    assert error["param"] == "seed"
    assert len(error["message"]) < 300


def test_38_129_deep_messages_and_lone_surrogates(server):
    deep: dict = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert "nested" in error_of(server.chat(tools=[tool]))["message"]
    raw = b'{"messages": [{"role": "user", "content": "a\\ud83d"}]}'
    assert server.http.post("/v1/chat/completions", content=raw, headers=JSON).status_code == 200
    for more in (b'"stop": "\\ud83d"', b'"\\ud83d": 1', b'"top_p": "\\ud83d"'):
        bad = raw[:-1] + b", " + more + b"}"
        error_of(server.http.post("/v1/chat/completions", content=bad, headers=JSON))
    raw = b'{"prompt": "a\\ud83d", "echo": true, "user": "\\ud83d"}'
    answer = server.http.post("/v1/completions", content=raw, headers=JSON)
    assert answer.json()["choices"][0]["text"].startswith("a\ufffd")
    raw = b'{"model": "\\ud83d", "prompt": "a"}'
    error_of(server.http.post("/v1/completions", content=raw, headers=JSON), 404)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "auto", "text", "function", "hi", "enabled", "content", "\ud83d"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "function", "name", "text", "tool_calls", "id"]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=120)
@given(data=st.data(), kind=st.sampled_from([CHAT, COMPLETION]))
def test_no_body_is_the_server_s_fault(server, data, kind):
    """Random values in known and unknown fields: answered or refused by name, never a 5xx."""
    names = st.sampled_from([*HONOURED[kind], *REFUSED[kind], *IGNORED]) | st.text(max_size=4)
    body = data.draw(st.dictionaries(names, JSON_VALUES, max_size=3))
    if data.draw(st.booleans()):
        body = {"prompt": "a"} | body if kind == COMPLETION else {"messages": [USER]} | body
    path = "/v1/completions" if kind == COMPLETION else "/v1/chat/completions"
    answer = server.http.post(path, content=json.dumps(body), headers=JSON)
    if answer.status_code != 200:
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["message"]


def test_129_content_types_encodings_and_sizes(server):
    path = "/v1/completions"
    body = b'{"prompt": "a"}'
    assert "expected application/json" in error_of(server.http.post(path, content=body))["message"]
    headers = JSON | {"content-encoding": "gzip"}
    assert "gzip" in error_of(server.http.post(path, content=body, headers=headers))["message"]
    charset = {"content-type": "application/json; charset=utf-8"}
    assert server.http.post(path, content=body, headers=charset).status_code == 200
    with scripted(lambda request: [ids_of("a")], max_body_bytes=100) as small:
        for content in (b"x" * 200, iter([b"x" * 60, b"x" * 60])):
            error = error_of(small.http.post(path, content=content, headers=JSON), 413)
            assert error["code"] == "request_too_large"


def test_130_unknown_models_and_routes(server):
    error = error_of(server.chat(model="gpt-4"), 404)
    assert error["code"] == "model_not_found"
    assert NAME in error["message"]
    assert server.chat(model=NAME).json()["model"] == NAME
    assert error_of(server.http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert server.http.get(f"/v1/models/{NAME}").json()["max_model_len"] == 64
    assert server.http.get("/v1/models").json()["data"][0]["id"] == NAME
    for path in ("/nope", "/v1/chat/completions/", "/v1/responses", "/docs"):
        assert error_of(server.http.get(path), 404)["code"] == "not_found"
    answer = server.http.get("/v1/completions")
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_137_api_keys(caplog):
    script = [ids_of("</think>a<|im_end|>")]
    with scripted(lambda request: script, api_keys=("secret-one", "geheim-ü")) as server:
        for given in (None, "secret-one", "Bearer", "Bearer wrong", "Bearer secret-on", "Basic a"):
            headers = {} if given is None else {"authorization": given}
            for path in ("/v1/models", "/server_info", "/openapi.json"):
                answer = server.http.get(path, headers=headers)
                error = error_of(answer, 401)
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        right = [b"Bearer secret-one", b"bearer  secret-one", "Bearer geheim-ü".encode()]
        for key in right:
            assert server.http.get("/v1/models", headers={"authorization": key}).is_success, key
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert server.http.get(path).is_success
        info = server.http.get("/server_info", headers={"authorization": right[0]})
        assert info.json()["server"]["api_keys"] == 2
        assert "secret-one" not in info.text


def test_138_logs_have_ids_and_no_text_and_do_not_flood(server, caplog, monkeypatch):
    monkeypatch.setattr(logs.LOG, "propagate", True)
    logs.LOG.addFilter(limit := logs._Limit())
    try:
        with caplog.at_level(logging.INFO, logger="k26jax.server"):
            messages = [{"role": "user", "content": "a secret prompt"}]
            answer = server.chat(messages=messages)
            for _ in range(200):
                server.http.get("/nope")
    finally:
        logs.LOG.removeFilter(limit)
    assert len(caplog.records) < 150
    found = next(r for r in caplog.records if r.getMessage() == "answered")
    assert found.fields["request_id"] == answer.headers["x-request-id"]
    assert found.fields["output_tokens"] == answer.json()["usage"]["completion_tokens"]
    caplog.records[-1].fields = {"path": "/a\nerror forged"}
    assert "\n" not in logs._Text().format(caplog.records[-1])
    lines = [form.format(r) for form in (logs._Text(), logs._Json()) for r in caplog.records]
    assert json.loads(lines[-1])["event"] == "refused"
    assert not any("secret prompt" in line for line in lines)


def test_request_ids_are_kept_or_made(server):
    kept = server.http.get("/version", headers={"x-request-id": "mine-7"})
    assert kept.headers["x-request-id"] == "mine-7"
    made = {
        server.http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        for bad in ("a b", "x" * 200, "")
    }
    assert len(made) == 3
    assert all(id.startswith("req-") for id in made)


def test_tokenize_and_back(server):
    body = server.http.post("/tokenize", json={"prompt": "import os <|im_end|>"}).json()
    assert body == {
        "tokens": server.llm.encode("import os <|im_end|>"),
        "count": body["count"],
        "max_model_len": 64,
    }
    text = server.http.post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert text == {"prompt": "import os <|im_end|>"}
    chat = server.http.post("/tokenize", json={"messages": [USER]}).json()
    assert chat["count"] == server.chat().json()["usage"]["prompt_tokens"]
    for path, bad in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [USER]}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"messages": 3}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"token": [1]}),
    ):
        error_of(server.http.post(path, json=bad))


def test_the_docs_hold_the_table_of_fields(server):
    from fixtures.paths import REPOSITORY

    assert fields_table() in (REPOSITORY / "docs" / "server.md").read_text(encoding="utf-8")
    schema = server.http.get("/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]
