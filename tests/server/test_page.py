"""The page at `/`: what it may ask, in a real browser if there is one, and the trees it shows."""

from __future__ import annotations

import json
import re
import time

import pytest
from browser import Browser, find_chromium
from scripted import events_of, ids_of, scripted

from k26jax.server.page import PAGE_PATHS

# Three steps after the prefill: of two, three and two tokens.
ANSWER = "some thoughts</think>Hello <b>wörld</b>\n  and more<|im_end|>"
IDS = ids_of(ANSWER)
RUNS = [IDS[:1], IDS[1:3], IDS[3:6], IDS[6:]]


@pytest.fixture(scope="module")
def server():
    with scripted(lambda request: RUNS, draft_trees=True, slots=4) as server:
        yield server


def test_the_files_of_the_page_name_nothing_elsewhere(server):
    texts = {}
    for path in PAGE_PATHS:
        answer = server.http.get(path)
        assert answer.status_code == 200
        texts[path] = answer.text
        policy = answer.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'none'"
        assert all(re.fullmatch(r"[a-z-]+ ('self'|'none'|data:)", rule) for rule in policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        found = re.findall(r"(?:https?:)?//[\w.]+", answer.text)
        assert set(found) <= {"http://www.w3.org"}  # the name of SVG, which nobody asks
    assert set(re.findall(r'(?:src|href)="([\w.]+)"', texts["/"])) == {
        path[1:] for path in PAGE_PATHS if path != "/"
    }
    assert server.http.post("/").status_code == 405


def test_a_page_is_open_where_the_rest_wants_a_key():
    with scripted(lambda request: RUNS, api_keys=("secret",)) as server:
        assert all(server.http.get(path).status_code == 200 for path in PAGE_PATHS)
        assert server.http.get("/server_info").status_code == 401
        assert server.chat().status_code == 401


def trees_of(raw: bytes) -> list[dict]:
    own = [json.loads(event).get("k26jax", {}) for event in events_of(raw)]
    return [found for found in own if "trees" in found]


def test_trees_of_a_stream_are_those_of_its_steps(server):
    decode = server.llm.engine.loaded.tokenizer.decode
    raw = server.chat(stream=True, draft_trees=True, n=2).content
    for index in range(2):
        found = [own["trees"] for own in trees_of(raw) if own["index"] == index]
        assert [len(trees) for trees in found] == [1] * 3
        root = RUNS[0][-1]
        for (tree,), run in zip(found, RUNS[1:], strict=True):
            nodes = [root, *run[:-1]]
            assert tree["path"] == list(range(len(run)))
            texts = [decode([node], skip_special_tokens=False) for node in nodes]
            assert [tree["tokens"][node] for node in tree["path"]] == texts
            assert tree["parents"] == [0, *range(len(run) - 1), 0]
            root = run[-1]
    # A step's tree stands before its text.
    whole = server.chat(n=2).json()
    streamed = [json.loads(event)["choices"] for event in events_of(raw)]
    texts = [
        "".join(c["delta"].get("content") or "" for cs in streamed for c in cs if c["index"] == i)
        for i in range(2)
    ]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


def test_nothing_is_recorded_unless_asked_for(server):
    server.wait_idle()
    server.runner.traced.clear()
    assert trees_of(server.chat(stream=True).content) == []
    server.chat()
    assert set(server.runner.traced) == {False}
    assert trees_of(server.complete(stream=True, draft_trees=True).content)
    server.wait_idle()
    assert server.chat().status_code == 200
    assert server.runner.traced[-1] is False


def test_trees_that_cannot_be_shown_are_refused(server):
    answer = server.chat(draft_trees=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "draft_trees"
    with scripted(lambda request: RUNS) as other:
        answer = other.chat(draft_trees=True, stream=True)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_parameter"
        assert "--draft-trees" in answer.json()["error"]["message"]
        assert other.http.get("/server_info").json()["server"]["draft_trees"] is False


def test_the_accept_length_so_far_is_told_with_the_usage_so_far(server):
    options = {"continuous_usage_stats": True, "include_usage": True}
    raw = server.complete(stream=True, stream_options=options, ignore_eos=True, max_tokens=6)
    events = [json.loads(event) for event in events_of(raw.content)]
    so_far = [(event["usage"]["completion_tokens"], event["k26jax"]) for event in events]
    lengths = {tokens: own["accept_length"] for tokens, own in so_far}
    assert lengths == {1: 0.0, 3: 2.0, 6: 2.5}
    assert so_far[-1][1]["target_forwards"] == 2


needs_browser = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def tab(server, tmp_path_factory):
    program = find_chromium()
    assert program is not None
    with Browser(program, tmp_path_factory.mktemp("profile")) as tab:
        tab.resize(1200, 800)
        tab.open(server.url + "/")
        tab.wait("served !== null")
        yield tab


def text(tab, selector: str) -> str:
    return tab.js(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent).join('|')")


@needs_browser
def test_a_person_chats_with_the_keyboard_alone(server, tab):
    assert "tiny: NONE, context 512" in text(tab, "#model")
    assert tab.js("document.activeElement.id") == "text"
    tab.js("document.getElementById('trees').open = true")
    tab.type("one")
    tab.press("Enter", 13, shift=True)
    tab.type("two")
    assert tab.js("document.getElementById('text').value").startswith("one")
    tab.press("Enter", 13)
    tab.wait("!running && messages.length === 2")
    assert text(tab, ".user .text").startswith("one")
    assert text(tab, ".assistant > .text") == "Hello <b>wörld</b>\n  and more"
    assert tab.js("document.querySelectorAll('.assistant b').length") == 0
    assert text(tab, ".thoughts .text") == "some thoughts"
    assert tab.js("document.querySelector('.thoughts').open") is False
    assert text(tab, ".ending") == ""
    figures = text(tab, "#figures")
    assert re.match(rf"{len(IDS)} tokens · [\d.]+ tokens/s · accept length ", figures), figures
    assert f"{(len(IDS) - 1) / 3:.2f}" in figures
    # The last step's tree: as many accepted nodes as its run has tokens, the root included.
    assert text(tab, "#step-text") == "3 of 3"
    assert tab.js("document.querySelectorAll('#tree g.yes').length") == len(RUNS[3])
    assert tab.js("document.querySelectorAll('#tree g.no').length") == 1
    assert tab.js("document.querySelectorAll('#tree path').length") == len(RUNS[3])
    tab.js("document.getElementById('step').focus()")
    tab.press("ArrowLeft", 37)
    assert text(tab, "#step-text") == "2 of 3"
    assert tab.js("document.querySelectorAll('#tree g.yes').length") == len(RUNS[2])
    accepted = len(RUNS[2]) - 1
    assert f"{accepted} of {accepted + 1} drafted" in text(tab, "#tree-note")
    assert tab.js("document.getElementById('tree').getAttribute('aria-label')").startswith(
        f"{accepted} of {accepted + 1} drafted nodes accepted: "
    )


def until(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds()


@needs_browser
def test_the_next_message_has_the_turns_before_and_can_be_stopped(server, tab):
    if not tab.js("messages.length"):  # this test runs alone
        tab.js("document.getElementById('text').focus()")
        tab.type("one")
        tab.press("Enter", 13)
        tab.wait("!running && messages.length === 2")
    seen = []
    plain = server.runner.script
    server.runner.script = lambda request: seen.append(request) or plain(request)
    server.runner.gate.clear()
    tab.js("document.getElementById('text').focus()")
    tab.type("again")
    tab.press("Enter", 13)
    tab.wait("!!running")
    tab.wait("!document.getElementById('stop').hidden")
    assert text(tab, "#figures") == "waiting for the first token"
    until(lambda: seen)  # else the server may drop it before it begins
    tab.press("Escape", 27)
    tab.wait("!running")
    server.runner.gate.set()
    server.wait_idle()
    assert text(tab, ".ending").endswith("ended: stopped")
    assert tab.js("document.getElementById('text').value") == "again"
    prompt = server.llm.engine.loaded.tokenizer.decode(seen[0].prompt_token_ids)
    assert "Hello <b>wörld</b>" in prompt
    assert prompt.index("one") < prompt.index("Hello") < prompt.index("again")
    tab.js("document.getElementById('clear').click()")
    assert text(tab, ".turn") == ""
    server.runner.script = plain


@needs_browser
def test_an_error_is_told_and_the_message_kept(tab):
    tab.js("document.getElementById('text').value = ''")
    tab.js("document.getElementById('limit').value = 100000")
    tab.js("document.getElementById('text').focus()")
    tab.type("too much")
    tab.press("Enter", 13)
    tab.wait("!document.getElementById('error').hidden")
    assert "the context holds 512" in text(tab, "#error")
    assert tab.js("document.getElementById('text').value") == "too much"
    assert tab.js("messages.length") == 0
    tab.js("document.getElementById('limit').value = ''")
    tab.complaints[:] = [found for found in tab.complaints if "status of 400" not in found]


@needs_browser
@pytest.mark.parametrize("width", [320, 700, 1600])
def test_no_width_scrolls_sideways(tab, width):
    tab.js("document.getElementById('settings').open = true")
    tab.resize(width, 700)
    assert tab.js("document.documentElement.scrollWidth") <= width
    send = tab.js(
        "(({right, bottom}) => [right, bottom])(document.getElementById('send')"
        ".getBoundingClientRect())"
    )
    assert send[0] <= width
    assert send[1] <= 700
    tab.resize(1200, 800)


@needs_browser
def test_the_browser_asked_this_server_alone_and_had_no_complaint(server, tab):
    """After all that the tests above did."""
    urls = [url for url in tab.urls if not url.startswith("about:")]
    assert len(urls) >= 5
    assert {url for url in urls if not url.startswith(server.url + "/")} == set()
    assert tab.complaints == []


@needs_browser
def test_a_key_is_asked_for(tab):
    with scripted(lambda request: RUNS, api_keys=("secret",)) as server:
        tab.open(server.url + "/")
        tab.wait("!document.getElementById('error').hidden")
        assert "API key" in text(tab, "#error")
        assert tab.js("document.activeElement.id") == "key"
        tab.type("secret")
        tab.press("Enter", 13)
        tab.wait("served !== null")
        assert tab.js("document.getElementById('error').hidden")
        assert "started with --draft-trees" in text(tab, "#tree-note")
