"""The OpenAPI document is sound, and nothing that is sent to a route of it is the server's fault.

The bodies are made from the document's schemas, as schemathesis makes them, and then bent.
"""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import events_of, ids_of, scripted

from k26jax.server.page import PAGE_PATHS

WORDS = [
    "user",
    "assistant",
    "hi",
    "tiny",
    "a",
    "",
    "auto",
    "text",
    "<|im_end|>",
    "\ud83d",
    "ü",
    "\0",
]
NUMBERS = [
    0,
    1,
    2,
    -1,
    63,
    64,
    65,
    1 << 31,
    1 << 63,
    1 << 64,
    -(1 << 63),
    10**400,
    0.5,
    1e308,
    -0.0,
]
KEYS = ["type", "function", "name", "json", "regex", "properties", "items", "$ref", "text", "id"]
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(NUMBERS)
    | st.sampled_from(WORDS)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)
JSON = {"content-type": "application/json"}
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "QUERY", "get"]
HEADERS = {
    "content-type": [
        "application/json",
        "application/json; charset=latin-1",
        "text/plain",
        "",
        "é",
    ],
    "content-encoding": ["gzip", "identity", "x" * 300],
    "authorization": ["Bearer x", "Bearer", "Basic \xff"],
    "accept": ["text/event-stream", "*/*", "nothing"],
    "x-request-id": ["a", "a b", "ü"],
    "range": ["bytes=0-1"],
    "cookie": ["a=b; ="],
    "origin": ["null"],
}


@pytest.fixture(scope="module")
def server():
    with scripted(lambda request: [ids_of("a</think>b<|im_end|>")], context=64) as server:
        yield server
        # Whatever came, it serves, and nothing is left of it.
        assert server.chat().json()["choices"][0]["message"]["content"] == "b"
        assert server.http.get("/health").status_code == 200
        server.wait_idle()
        assert server.runner.busy == []
        counts = server.service.scheduler.counts
        assert counts.submitted == counts.ended


@pytest.fixture(scope="module")
def document(server) -> dict:
    return server.http.get("/openapi.json").json()


def target(document: dict, reference: str) -> dict:
    found = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def values(document: dict, schema: dict) -> st.SearchStrategy:
    """Returns what a schema allows."""
    if "$ref" in schema:
        return values(document, target(document, schema["$ref"]))
    if "anyOf" in schema:
        return st.one_of([values(document, one) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return st.one_of([_typed(document, schema, kind) for kind in kinds] or [ANYTHING])


def _typed(document: dict, schema: dict, kind: str) -> st.SearchStrategy:
    if kind == "array":
        inner = values(document, schema.get("items", {}))
        return st.lists(inner, min_size=schema.get("minItems", 0), max_size=3)
    if kind == "object" and "properties" in schema:
        fields = {name: values(document, one) for name, one in schema["properties"].items()}
        required = {name: fields.pop(name) for name in schema.get("required", [])}
        few = (
            st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
            if fields
            else st.just([])
        )
        return few.flatmap(
            lambda names: st.fixed_dictionaries(required | {n: fields[n] for n in names})
        )
    return {
        "null": st.none(),
        "boolean": st.booleans(),
        "string": st.sampled_from(WORDS) | st.text(max_size=8),
        "integer": st.integers(-2, 20)
        | st.sampled_from([n for n in NUMBERS if isinstance(n, int)]),
        "number": st.floats(-3, 3) | st.sampled_from(NUMBERS),
        "object": st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3),
    }[kind]


def bodies(document: dict, operation: dict) -> st.SearchStrategy[bytes]:
    """Returns bodies that the document allows, and bent ones."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    good = values(document, content.get("schema", {}))
    names = list(content and target(document, content["schema"]["$ref"])["properties"])
    bent = st.tuples(
        good.filter(lambda body: isinstance(body, dict)),
        st.dictionaries(
            st.sampled_from([*names, "x", "", "Rid"]), ANYTHING, min_size=1, max_size=2
        ),
    ).map(lambda two: two[0] | two[1])
    raw = (good | bent | ANYTHING).map(lambda body: json.dumps(body).encode())
    cut = st.tuples(raw, st.integers(0, 200), st.binary(max_size=3)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + 1 :]
    )
    return st.one_of(raw, raw, cut, st.binary(max_size=8))


def check(answer, path: str) -> None:
    """Fails for a fault of the server, and for an error that is not told as clients read it."""
    if answer.request.method == "HEAD":
        assert answer.status_code in (404, 405), answer
        return
    if answer.status_code < 400:
        assert answer.status_code == 200, answer
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert not any('"error"' in event[:10] for event in events_of(answer.content))
        return
    assert answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}, (path, body)
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert isinstance(error["code"], str)


def test_the_document_is_sound(document):
    """Every reference leads somewhere, every part of a path is declared, errors are told."""
    for reference in re.findall(r'"\$ref": "([^"]*)"', json.dumps(document)):
        assert target(document, reference)
    assert document["openapi"].startswith("3.1")
    for path, operations in document["paths"].items():
        for operation in operations.values():
            declared = {one["name"] for one in operation.get("parameters", [])}
            assert declared == set(re.findall(r"{(\w+)}", path))
            assert {"200", "default"} <= operation["responses"].keys()


@pytest.fixture(scope="module")
def sent(document) -> dict[str, st.SearchStrategy[bytes]]:
    """By path, what is posted there."""
    paths = document["paths"].items()
    return {path: bodies(document, found["post"]) for path, found in paths if "post" in found}


@settings(max_examples=250)
@given(data=st.data())
def test_no_body_of_the_document_s_or_a_bent_one_is_the_server_s_fault(server, sent, data):
    path = data.draw(st.sampled_from([*sent, *list(sent)[:2] * 2]))
    body = data.draw(sent[path])
    check(server.http.post(path, content=body, headers=JSON), path)


@pytest.mark.parametrize("name", ["", "Rid", "é", "1", "a.b"])
def test_a_field_that_nobody_knows_is_named_whatever_it_is(server, sent, name):
    for path in sent.keys() - {"/flush_cache"}:
        body = ({"tokens": [1]} if path == "/detokenize" else {}) | {name: 1}
        raw = json.dumps(body).encode()
        answer = server.http.post(path, content=raw, headers=JSON)
        check(answer, path)
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", name), path
        answer = server.http.post(path, content=b'{"\\ud83d": 1}', headers=JSON)
        check(answer, path)
        assert answer.status_code == 400


@settings(max_examples=150)
@given(data=st.data())
def test_no_method_header_or_path_is_the_server_s_fault(server, document, data):
    path = data.draw(
        st.sampled_from([*document["paths"], *PAGE_PATHS, "/openapi.json", "/nope", "//"])
    )
    name = data.draw(st.sampled_from(["tiny", "a/b", "..", "\0", "%", "é" * 100, "\ud83d"]))
    url = path.replace("{name}", quote(name, safe="/", errors="replace"))
    url += data.draw(st.sampled_from(["", "", "/", "?a=b&a", "?%ff=%00", "%2f..", "%00"]))
    method = data.draw(st.sampled_from(METHODS))
    some = data.draw(st.lists(st.sampled_from(sorted(HEADERS)), max_size=4, unique=True))
    headers = [(n.encode(), data.draw(st.sampled_from(HEADERS[n])).encode()) for n in some]
    body = data.draw(st.sampled_from([b"", b"{}", b'{"prompt": "a"}', b"\xff", b"[]"]))
    check(server.http.request(method, url, content=body, headers=headers), url)


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            True, False, {"enum": [1, "a"]}, {"type": "string", "pattern": "a{1,3}"}, {"$ref": "#"},
            {"type": "integer", "multipleOf": 3}, {"type": "string", "minLength": -1}, {"not": {}},
            {"type": ["string", "null"]}, {"type": "array", "minItems": 10**9}, {"$ref": "#/x"},
        ]
    ),
    lambda inner: (
        st.builds(lambda one: {"type": "array", "items": one}, inner)
        | st.builds(
            lambda one, names: {"type": "object", "properties": {"p": one}, "required": names},
            inner,
            st.sampled_from([["p"], [], ["z"], None, 3]),
        )
        | st.builds(lambda key, two: {key: two}, st.sampled_from(["anyOf", "oneOf", "allOf"]),
                    st.lists(inner, max_size=2))
    ),
    max_leaves=4,
)  # fmt: skip
PATTERNS = st.text(alphabet="ab.*+?()[]{}|^$1,-", max_size=8)


@settings(max_examples=120)
@given(schema=SCHEMAS, pattern=PATTERNS, stream=st.booleans())
def test_no_shape_of_an_answer_is_the_server_s_fault(server, schema, pattern, stream):
    named = {"name": "a", "schema": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for more in (
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"structured_outputs": {"regex": pattern}},
        {"tools": [tool], "tool_choice": "required"},
    ):
        check(server.chat(stream=stream, **more), "/v1/chat/completions")
