"""The whole road from tokens to a chat message, streamed and not, for every split into runs."""

import json

import pytest
from conversations import (
    END,
    SECTION,
    TOOLS,
    answer,
    call,
    calls,
    ids_of,
    positions,
    read,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from k26jax.errors import RequestError
from k26jax.text.events import ChatMessage, ContentDelta, Finish, ReasoningDelta, merge_deltas
from k26jax.text.thinking import read_thinking

QUERY = '{"query": "é😀"}'
PARTS = st.sampled_from(
    [
        *("<think>", "</think>", "thought ", "answer ", "中é", "😀", "\n\n", " stop", "[PAD]", END),
        *(
            calls(call("functions.search:0", QUERY)),
            call("odd", QUERY),
            call("functions_search_1", ""),
        ),
        *("<|tool_call_section_end|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ]
)


@settings(max_examples=150)
@given(
    parts=st.lists(PARTS, min_size=1, max_size=9),
    cuts=st.lists(st.booleans(), min_size=1, max_size=11),
    thinking=st.booleans(),
    tools=st.booleans(),
    stop=st.sampled_from([(), ("stop",), ("k>\n", "hought a"), ('"query"',), ("[PAD]",)]),
    include=st.booleans(),
    limit=st.integers(1, 200),
)
def test_every_split_gives_the_same_message(
    trained, parts, cuts, thinking, tools, stop, include, limit
):
    ids = ids_of(trained, "".join(parts))
    options = {"thinking": thinking, "stop": stop, "include_stop": include, "max_tokens": limit}
    readers = [answer(trained, TOOLS if tools else None, **options) for _ in range(3)]
    runs: list[list[int]] = [[]]
    for place, token in enumerate(ids):
        runs[-1].append(token)
        if cuts[place % len(cuts)]:
            runs.append([])
    streams = []
    for reader, pieces in zip(readers, ([ids], runs, [[token] for token in ids]), strict=True):
        events = [event for run in pieces for event in reader.push(run)]
        streams.append(merge_deltas(events + reader.end("abort")))
    assert streams[0] == streams[1] == streams[2]
    whole, finish = readers[0], readers[0].message.finish
    assert streams[0][-1] == finish
    # What a client puts together from the stream is what it gets without one.
    streamed = ChatMessage(streams[1])
    assert streamed.record() == whole.message.record()
    assert json.loads(json.dumps(streamed.record())) == streamed.record()
    usage = finish.usage
    assert usage.completion_tokens == len(whole.token_ids) <= min(limit, len(ids))
    assert 0 <= usage.reasoning_tokens <= usage.completion_tokens
    shown = [p for found in positions(streams[0]).values() for p in found]
    assert len(shown) == len(set(shown))
    assert all(0 <= p < len(whole.token_ids) for p in shown)
    assert whole.push(ids) == whole.end("abort") == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": True}}, True),
    ],
)
def test_bug_23_every_switch_of_thinking(trained, fields, expected):
    said = read_thinking(**fields)
    assert (said.is_on, said.is_preserved, said.options) == (expected, None, {})
    if expected is False:
        reader = read(trained, f"all of it{END}", thinking=False)
        assert reader.message.record() == {
            "role": "assistant",
            "content": "all of it",
            "reasoning_content": None,
        }
        assert reader.message.finish.usage.reasoning_tokens == 0


def test_what_requests_say_about_thinking_besides():
    keep = read_thinking({"type": "enabled", "keep": "all"}, {"tone": "dry"})
    assert (keep.is_on, keep.is_preserved, keep.options) == (True, True, {"tone": "dry"})
    kwargs = read_thinking(None, {"preserve_thinking": False})
    assert (kwargs.is_on, kwargs.is_preserved, kwargs.options) == (None, False, {})
    assert read_thinking(reasoning_effort="low").effort == "low"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking": True}, "thinking is True, expected"),
        ({"thinking": {"type": "auto"}}, "expected .*enabled"),
        (
            {"thinking": {"type": "enabled", "kep": 1}},
            "thinking.kep is unknown; did you mean 'keep'",
        ),
        ({"thinking": {"type": "enabled", "keep": 5}}, "thinking.keep is 5"),
        ({"chat_template_kwargs": []}, "no object"),
        ({"chat_template_kwargs": {"thinking": "no"}}, "thinking is 'no', expected true or false"),
        ({"reasoning_effort": "much"}, "reasoning_effort is 'much', expected one of none"),
        (
            {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
            r"both on and off \(thinking on, reasoning_effort off\)",
        ),
        (
            {
                "thinking": {"type": "enabled", "keep": "all"},
                "chat_template_kwargs": {"preserve_thinking": False},
            },
            "preserve_thinking differ",
        ),
    ],
)
def test_contradictions_about_thinking_are_refused(fields, words):
    with pytest.raises(RequestError, match=words):
        read_thinking(**fields)


def test_bug_25_content_is_null_beside_calls_alone(trained):
    only_calls = read(trained, calls(call("functions.search:0", QUERY)) + END, TOOLS)
    record = only_calls.message.record()
    assert (record["content"], record["reasoning_content"]) == (None, None)
    assert record["tool_calls"] == [
        {
            "id": "functions.search:0",
            "type": "function",
            "function": {"name": "search", "arguments": QUERY},
        }
    ]
    thoughts = read(trained, "thinking of it", thinking=True, max_tokens=2)
    assert thoughts.message.record()["content"] == ""
    assert "tool_calls" not in thoughts.message.record()


def test_bug_26_thoughts_that_use_the_whole_budget(trained):
    ids = ids_of(trained, "a long thought about nothing at all, " * 9)
    reader = answer(trained, TOOLS, thinking=True, max_tokens=20)
    events = reader.push(ids)
    finish = events[-1]
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.usage.reasoning_tokens) == ("length", 20)
    assert finish.usage.record()["completion_tokens_details"] == {"reasoning_tokens": 20}
    assert reader.message.content == ""
    assert reader.message.reasoning == trained.decode(ids[:20])


def test_bug_31_an_empty_turn_after_the_thoughts_is_reported_as_it_is(trained):
    reader = read(trained, f"done</think>{END}", TOOLS, thinking=True)
    assert reader.message.record()["content"] == ""
    assert (reader.message.reasoning, reader.message.finish_reason) == ("done", "stop")
    usage = reader.message.finish.usage.record()
    assert usage["completion_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] + 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize(
    ("stop", "include", "reasoning", "content"),
    [
        ("ink", False, "I th", ""),
        ("ink", True, "I think", ""),
        ("</think>", False, "I think", ""),
        ("</think>", True, "I think", ""),
        ("k</th", False, "I thin", ""),
        ("nk>So", False, "I think", ""),
        ("nk>So", True, "I think", "So"),
        ("thinkSo", False, "I think", "So it is"),
        ("it", False, "I think", "So "),
    ],
)
def test_bug_35_stop_strings_in_thoughts_and_at_their_border(
    trained, stop, include, reasoning, content
):
    ids = ids_of(trained, f"I think</think>So it is{END}")
    for runs in ([ids], [[token] for token in ids]):
        reader = answer(trained, thinking=True, stop=[stop], include_stop=include)
        for run in runs:
            reader.push(run)
        assert (reader.message.reasoning, reader.message.content) == (reasoning, content)
        assert reader.message.finish_reason == "stop"
        matched = None if stop == "thinkSo" else stop
        assert reader.message.finish.stop_reason == matched


def test_bug_42_one_run_with_the_end_of_thinking_and_the_start_of_the_answer(trained):
    ids = ids_of(trained, "so be it</think>\n\nHello")
    reader = answer(trained, thinking=True)
    thought, said = reader.push(ids)
    tag = ids.index(trained.special_ids["</think>"])
    assert thought == ReasoningDelta("so be it", tuple(range(tag)))
    assert said == ContentDelta("\n\nHello", tuple(range(tag + 1, len(ids))))


def test_thoughts_that_the_answer_opens_itself_and_opens_again(trained):
    text = f"<think>a</think>b<think>c</think>d</think>e{END}"
    for thinking in (False, True):
        reader = read(trained, text, thinking=thinking)
        assert (reader.message.reasoning, reader.message.content) == ("ac", "bde")
    assert reader.message.finish.usage.reasoning_tokens == 2 + 1  # the tag that opened nothing
    plain = read(trained, text)
    assert plain.message.finish.usage.reasoning_tokens == 2


def test_calls_end_the_thoughts_without_a_tag(trained):
    written = f"let me look{calls(call('functions.search:0', QUERY))}{END}"
    reader = read(trained, written, TOOLS, thinking=True)
    assert (reader.message.reasoning, reader.message.content) == ("let me look", None)
    assert reader.message.tool_calls[0].arguments == QUERY
    assert reader.message.finish.usage.reasoning_tokens == len(trained.encode("let me look"))


def test_bug_11_without_tools_nothing_is_a_call(trained):
    reader = read(trained, f"a{calls(call('functions.search:0', QUERY))}{END}")
    assert reader.message.tool_calls == []
    assert reader.message.content == f"afunctions.search:0{QUERY}"
    half = read(trained, f"a{SECTION}b", thinking=True, max_tokens=3)
    assert (half.message.reasoning, half.message.content) == ("a", "b")


def test_a_stop_string_within_arguments_leaves_the_call_unfinished(trained):
    written = calls(call("functions.search:0", '{"query": "STOP"}'))
    reader = read(trained, written + END, TOOLS, stop=["STOP"])
    (found,) = reader.message.tool_calls
    assert (found.arguments, found.is_complete) == ('{"query": "', False)
    assert (reader.message.finish_reason, reader.message.finish.stop_reason) == ("stop", "STOP")


def test_usage_counts_cached_tokens_and_grows(trained):
    reader = answer(trained, thinking=True)
    reader.set_cached_tokens(2)
    reader.push(ids_of(trained, "ab"))
    before = reader.usage()
    reader.push(ids_of(trained, "</think>c"))
    after = reader.usage()
    assert before.reasoning_tokens == before.completion_tokens == after.reasoning_tokens
    assert after.completion_tokens == before.completion_tokens + 2
    assert after.record()["prompt_tokens_details"] == {"cached_tokens": 2}
