"""Calls of tools out of tokens: every spelling, every mistake, every cut."""

import json
import random

import pytest
from conversations import (
    ARGUMENTS,
    CALL,
    CALL_END,
    END,
    SEARCH,
    SECTION,
    SECTION_END,
    TOOLS,
    answer,
    call,
    calls,
    ids_of,
    read,
    tool,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from k26jax.text.events import (
    ContentDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    delta_of,
)

QUERY = '{"query": "x"}'
MARKERS = [SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END, "<think>", "</think>"]


def made(reader) -> list[tuple]:
    """Returns (id, name, arguments, is_complete) of every call."""
    return [(c.id, c.name, c.arguments, c.is_complete) for c in reader.message.tool_calls]


@pytest.mark.parametrize(
    ("written", "name", "expected"),
    [
        ("functions_read_file_3", "read_file", "functions.read_file:3"),
        ("functions_f_2_0_1", "f_2_0", "functions.f_2_0:1"),
        ("functions_f_2_0", "f_2_0", "functions.f_2_0:0"),
        ("functions.read_file:3", "read_file", "functions.read_file:3"),
    ],
)
def test_bug_01_sanitised_ids_are_calls_with_kimis_id(trained, written, name, expected):
    reader = read(trained, calls(call(written, "{}")) + END, [tool("f"), tool(name)])
    assert made(reader) == [(expected, name, "{}", True)]
    assert reader.message.record()["content"] is None
    assert reader.message.finish_reason == "tool_calls"


def test_bug_02_without_separators_the_longest_name_or_text(trained):
    reader = read(trained, calls(call("functionsexec5", "{}")) + END, [tool("exec"), tool("exe")])
    assert made(reader) == [("functions.exec:5", "exec", "{}", True)]
    other = read(trained, calls(call("functionsexec5", '{"a": 1}')) + END, [tool("run")])
    assert made(other) == []
    assert other.message.content == 'functionsexec5{"a": 1}'
    assert (other.message.unreadable_calls, other.message.finish_reason) == (1, "stop")


def test_bug_03_foreign_ids_go_to_the_only_tool_that_fits(trained):
    reader = read(trained, calls(call("call_x1", QUERY)) + END, TOOLS, made=4)
    assert made(reader) == [("functions.search:4", "search", QUERY, True)]
    two = [tool("a", {"x": {}}), tool("b", {"x": {}})]
    ambiguous = read(trained, calls(call("call_x1", '{"x": 1}')) + END, two)
    assert (made(ambiguous), ambiguous.message.unreadable_calls) == ([], 1)
    assert ambiguous.message.content == 'call_x1{"x": 1}'
    pending = read(trained, f"{SECTION}{CALL}call_x1{ARGUMENTS}{QUERY}{END}", TOOLS)
    assert made(pending) == [("functions.search:0", "search", QUERY, True)]
    cut = read(trained, f"{SECTION}{CALL}call_x1{ARGUMENTS}{QUERY}", TOOLS)
    cut.end("length")
    assert (made(cut), cut.message.content) == ([], f"call_x1{QUERY}")


@pytest.mark.parametrize("written", ["search:2", "functions.search:2"])
def test_bug_05_ids_without_prefix(trained, written):
    reader = read(trained, calls(call(written, QUERY)) + END, TOOLS)
    assert made(reader) == [("functions.search:2", "search", QUERY, True)]


@pytest.mark.parametrize("written", [":2", "2", "", " \n", "se\narch"])
def test_bug_05_a_bare_counter_or_nothing_is_told_by_the_arguments(trained, written):
    reader = read(trained, calls(call(written, QUERY)) + END, TOOLS)
    assert made(reader) == [("functions.search:0", "search", QUERY, True)]
    text = read(trained, calls(call(written, "?")) + END, TOOLS)
    assert (made(text), text.message.content) == ([], written + "?")


def test_bug_05_a_dotted_name_and_one_that_was_not_declared(trained):
    written = calls(call("functions.a.b:2", "{}"), call("functions.made_up:3", "{}"))
    reader = read(trained, written + END, [tool("a.b")])
    assert made(reader) == [
        ("functions.a.b:2", "a.b", "{}", True),
        ("functions.made_up:3", "made_up", "{}", True),
    ]


THREE = [
    json.dumps({"query": 'a}{"b" \\" <|tool_call_end|> </think>'}),
    '{"path": "C:\\\\x\\n", "deep": [{"a": {}}]}',
    '{"city": "中é😀", "days": 2}',
]


@settings(max_examples=100)
@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_bug_06_three_calls_of_one_section_for_every_split(trained, cuts):
    names = ["search", "read_file", "get_weather"]
    parts = [f"{SECTION}"]
    for index, (name, arguments) in enumerate(zip(names, THREE, strict=True)):
        parts += [f"{CALL}functions.{name}:{index}{ARGUMENTS}", arguments, CALL_END]
    # Names of markers inside of strings are letters, not control tokens.
    ids = [
        token
        for part in [*parts, SECTION_END, END]
        for token in (trained.encode(part) if part in THREE else ids_of(trained, part))
    ]
    reader, run = answer(trained, TOOLS), []
    for place, token in enumerate(ids):
        run.append(token)
        if cuts[place % len(cuts)]:
            reader.push(run)
            run = []
    reader.push(run)
    assert made(reader) == [
        (f"functions.{name}:{index}", name, arguments, True)
        for index, (name, arguments) in enumerate(zip(names, THREE, strict=True))
    ]
    assert reader.message.content is None


def test_bug_07_long_arguments_and_markers_that_come_in_one_run(trained):
    arguments = json.dumps({"query": "    return self.assertEqual(" * 7_500})
    ids = ids_of(trained, "before" + calls(call("functions.search:0", arguments)) + END)
    assert len(arguments) > 200_000
    for size in (9, len(ids)):
        reader = answer(trained, [SEARCH], max_tokens=len(ids))
        for start in range(0, len(ids), size):
            reader.push(ids[start : start + size])
        assert made(reader) == [("functions.search:0", "search", arguments, True)]
        assert (reader.message.content, reader.message.finish_reason) == ("before", "tool_calls")


def test_bug_07_run_borders_at_every_position(trained):
    ids = ids_of(trained, "before" + calls(call("functions.search:0", QUERY)) + END)
    for border in range(len(ids) + 1):
        reader = answer(trained, [SEARCH])
        reader.push(ids[:border])
        reader.push(ids[border:])
        assert made(reader) == [("functions.search:0", "search", QUERY, True)]
        assert reader.message.content == "before"


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_bug_09_a_cut_after_every_token_of_a_call(trained, reason):
    written = "so" + calls(call("functions.search:0", QUERY), call("call_9", QUERY))
    ids = ids_of(trained, written)
    second = ids.index(trained.special_ids[CALL_END]) + 1
    for count in range(1, len(ids) + 1):
        reader = answer(trained, TOOLS, max_tokens=count if reason == "length" else 10_000)
        events = reader.push(ids[:count]) + reader.end("abort")
        assert reader.message.finish_reason == reason
        shown = reader.message.content or ""
        assert "<|" not in shown + "".join(c.arguments for c in reader.message.tool_calls)
        starts = [event.index for event in events if isinstance(event, ToolCallStart)]
        ends = [event.index for event in events if isinstance(event, ToolCallEnd)]
        assert starts == ends == list(range(len(starts)))
        if starts and count >= second:
            assert made(reader)[0] == ("functions.search:0", "search", QUERY, True)
        elif starts:
            assert made(reader)[0][1] == "search"
            assert QUERY.startswith(made(reader)[0][2])
            assert made(reader)[0][3] is False


def test_bug_10_text_that_resembles_a_marker_is_text(trained):
    for text in (
        "<|tool_call",
        "<|tool_calls_section_begin",
        "a <| b",
        "<|tool_call_section_begi>",
    ):
        for token_by_token in (False, True):
            reader = answer(trained, TOOLS)
            ids = trained.encode(f"see {text} and more") + ids_of(trained, END)
            for run in [[token] for token in ids] if token_by_token else [ids]:
                reader.push(run)
            assert reader.message.content == f"see {text} and more"


@given(
    st.lists(
        st.sampled_from([*MARKERS, "w", "w", "w", "{", "functions.search:0", " "]), max_size=14
    )
)
def test_bug_10_every_word_comes_out_exactly_once(trained, parts):
    """Words that are ids of calls aside, which become calls."""
    words = [f"w{index}." if part == "w" else part for index, part in enumerate(parts)]
    reader = read(trained, "".join(words) + END, TOOLS)
    message = reader.message
    shown = (message.reasoning or "") + (message.content or "")
    shown += "".join(call.arguments for call in message.tool_calls)
    for index, part in enumerate(parts):
        if part == "w":
            assert shown.count(words[index]) == 1, (words, shown)
    braces = shown.count("{") - shown.count("{}")
    filled = sum(call.arguments == "{}" for call in message.tool_calls)
    assert braces + shown.count("{}") - filled == parts.count("{")
    named = sum(call.name == "search" for call in message.tool_calls)
    assert shown.count("functions.search:0") + named >= parts.count("functions.search:0")


@settings(max_examples=100)
@given(st.integers(0, 10**9), st.lists(st.booleans(), min_size=1, max_size=5), st.booleans())
def test_bug_13_no_sequence_of_markers_is_an_exception(trained, seed, cuts, thinking):
    draw = random.Random(seed)
    alphabet = [trained.special_ids[name] for name in MARKERS]
    alphabet += [*trained.encode('functions.search:0 {"query"} x'), *range(128, 160)]
    ids = [draw.choice(alphabet) for _ in range(60)]
    whole = answer(trained, TOOLS, thinking=thinking)
    whole.push(ids)
    whole.end("abort")
    message = whole.message
    size = len(message.content or "") + len(message.reasoning or "")
    size += sum(len(call.arguments) for call in message.tool_calls)
    bytes_in = sum(len(trained.token_bytes(token)) for token in ids)
    assert size <= bytes_in + 2 * len(message.tool_calls)
    split, run = answer(trained, TOOLS, thinking=thinking), []
    for place, token in enumerate(ids):
        run.append(token)
        if cuts[place % len(cuts)]:
            split.push(run)
            run = []
    split.push(run)
    split.end("abort")
    assert split.message.record() == message.record()
    assert split.message.finish == message.finish


def test_bug_14_calls_finish_as_tool_calls_and_nothing_else_does(trained):
    written = calls(call("functions.search:0", QUERY))
    assert read(trained, written + END, TOOLS).message.finish_reason == "tool_calls"
    assert read(trained, "text" + END, TOOLS).message.finish_reason == "stop"
    assert read(trained, written + END).message.finish_reason == "stop"
    limit = len(ids_of(trained, written))
    assert read(trained, written, TOOLS, max_tokens=limit).message.finish_reason == "length"
    broken = read(trained, f'{SECTION}{CALL}functions.search:0{ARGUMENTS}{{"q{END}', TOOLS)
    assert broken.message.finish_reason == "stop"
    assert made(broken) == [("functions.search:0", "search", '{"q', False)]


def test_bug_15_events_of_two_calls(trained):
    written = calls(call("functions.search:0", QUERY), call("functions.search:0", QUERY))
    reader = answer(trained, TOOLS)
    events = [event for token in ids_of(trained, written + END) for event in reader.push([token])]
    starts = [event for event in events if isinstance(event, ToolCallStart)]
    # The model gave both the same id.
    assert starts == [
        ToolCallStart(0, "functions.search:0", "search"),
        ToolCallStart(1, "functions.search:1", "search"),
    ]
    pieces = [event for event in events if isinstance(event, ToolCallArguments)]
    assert [event.index for event in pieces] == sorted(event.index for event in pieces)
    assert len(pieces) > 4
    for index in (0, 1):
        text = "".join(event.text for event in pieces if event.index == index)
        assert json.loads(text) == {"query": "x"}
    assert [event for event in events if isinstance(event, ToolCallEnd)] == [
        ToolCallEnd(0, True),
        ToolCallEnd(1, True),
    ]


def test_bug_15_deltas_of_two_calls_byte_for_byte(trained):
    written = f"hm</think>so{calls(call('functions.search:0', '{}'), call('call_7', QUERY))}{END}"
    reader = answer(trained, TOOLS, thinking=True)
    deltas = [delta_of(event) for event in reader.push(ids_of(trained, written))]
    assert "\n".join(json.dumps(delta) for delta in deltas if delta) == (
        '{"reasoning_content": "hm"}\n'
        '{"content": "so"}\n'
        '{"tool_calls": [{"index": 0, "id": "functions.search:0", "type": "function", '
        '"function": {"name": "search", "arguments": ""}}]}\n'
        '{"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}\n'
        '{"tool_calls": [{"index": 1, "id": "functions.search:1", "type": "function", '
        '"function": {"name": "search", "arguments": ""}}]}\n'
        '{"tool_calls": [{"index": 1, "function": {"arguments": "{\\"query\\": \\"x\\"}"}}]}'
    )


@pytest.mark.parametrize(
    "end", [SECTION_END, "<|tool_call_section_end|>", " <|tool_call_section_end|>"]
)
@pytest.mark.parametrize("begin", [SECTION, "<|tool_call_section_begin|>"])
@pytest.mark.parametrize("token_by_token", [False, True])
def test_bug_17_both_spellings_of_the_section(trained, begin, end, token_by_token):
    ids = ids_of(trained, f"so {begin}{call('functions.search:0', QUERY)}{end}done{END}")
    reader = answer(trained, TOOLS)
    for run in [[token] for token in ids] if token_by_token else [ids]:
        reader.push(run)
    assert made(reader) == [("functions.search:0", "search", QUERY, True)]
    assert reader.message.content == "so done"


def test_spelled_markers_in_strings_and_without_tools_are_text(trained):
    arguments = '{"query": "<|tool_call_section_end|> <|tool_call_section_begin|>"}'
    reader = read(trained, calls(call("functions.search:0", arguments)) + END, TOOLS)
    assert made(reader) == [("functions.search:0", "search", arguments, True)]
    assert read(trained, f"a<|tool_call_section_begin|>{END}").message.content == (
        "a<|tool_call_section_begin|>"
    )
    assert read(trained, f"a<|tool_call_section_end|>{END}", TOOLS).message.content == (
        "a<|tool_call_section_end|>"
    )


@pytest.mark.parametrize(
    ("written", "expected", "content"),
    [
        # No section, no end of it, no end of the call, no marker of arguments, no arguments.
        (call("functions.search:0", QUERY), [QUERY], None),
        (SECTION + call("functions.search:0", QUERY), [QUERY], None),
        (f"{SECTION}{CALL}functions.search:0{ARGUMENTS}{QUERY}{SECTION_END}", [QUERY], None),
        (f"{SECTION}{CALL}functions.search:0{ARGUMENTS}{QUERY}", [QUERY], None),
        (f"{SECTION}{CALL}functions.search:0{QUERY}{CALL_END}{SECTION_END}", [QUERY], None),
        (f"{SECTION}{CALL}functions.search:0{CALL_END}{SECTION_END}", ["{}"], None),
        (f"{SECTION}{CALL}functions.search:0{ARGUMENTS}{CALL_END}{SECTION_END}", ["{}"], None),
        (calls(call("functions.search:0", " ")), [" {}"], None),
        # A call begins within a call, a section within a section, prose between calls.
        (
            f"{SECTION}{CALL}functions.search:0{ARGUMENTS}{QUERY}"
            + call("functions.search:1", QUERY),
            [QUERY, QUERY],
            None,
        ),
        (f"{SECTION}{CALL}odd{calls(call('functions.search:0', QUERY))}", [QUERY], "odd"),
        (calls("\n ", call("functions.search:0", QUERY), "\n"), [QUERY], None),
        (calls("\n so", call("functions.search:0", QUERY), " ", "on "), [QUERY], "\n so on "),
        (f"{CALL_END}{ARGUMENTS}a{SECTION_END}", [], "a"),
        (calls(call("functions.search:0", '{"query": "<think>"}')), ['{"query": "<think>"}'], None),
        (calls("<think>", call("functions.search:0", QUERY)), [QUERY], None),
    ],
)
def test_malformed_sections_are_taken_as_they_are_meant(trained, written, expected, content):
    ids = ids_of(trained, written + END)
    for runs in ([ids], [[token] for token in ids]):
        reader = answer(trained, TOOLS)
        for run in runs:
            reader.push(run)
        assert [c.arguments for c in reader.message.tool_calls] == expected
        assert reader.message.content == (content if content or expected else "")


def test_text_comes_at_once_and_calls_as_soon_as_they_are_named(trained):
    reader = answer(trained, TOOLS)
    assert reader.push(ids_of(trained, "so"))[0].text == "so"
    assert reader.push(ids_of(trained, f"{SECTION}{CALL}functions.search:0")) == []
    assert reader.push(ids_of(trained, ARGUMENTS)) == [
        ToolCallStart(0, "functions.search:0", "search")
    ]
    (event,) = reader.push(trained.encode('{"query'))
    assert event.text == '{"query'
    assert isinstance(event, ToolCallArguments)
    assert not any(isinstance(event, ContentDelta) for event in reader.push(trained.encode('"')))
