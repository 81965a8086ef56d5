"""Messages and tools of a request: one form out of many, or a refusal that names the field."""

import json

import pytest
from conversations import SEARCH, TOOLS, tool

from k26jax.errors import RequestError
from k26jax.text.messages import check_messages, count_calls
from k26jax.text.tools import check_tools, choose_tools, forced_tools, tool_for

USER = {"role": "user", "content": "Hi"}


def asks(id, name="search", arguments='{"query": "x"}', **message):
    function = {"name": name, "arguments": arguments}
    calls = [{"id": id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls} | message


def answers(id, content="found"):
    return {"role": "tool", "tool_call_id": id, "content": content}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_bug_19_all_ways_of_saying_nothing_are_one(role):
    empty = [None, "", [], [{"type": "text", "text": ""}], [{"text": ""}]]
    forms = [
        check_messages([{"role": role, "content": content, "tool_call_id": "a"}])
        for content in empty
    ]
    assert all(form == forms[0] for form in forms)
    assert forms[0][0]["content"] == ""


def test_parts_are_joined_and_developers_are_the_system():
    content = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    checked = check_messages([{"role": "developer", "content": content, "name": ""}])
    assert checked == [{"role": "system", "content": "abc"}]


@pytest.mark.parametrize("raw", ["functions_search_3", "functions.search:3", "functions-search-3"])
def test_bug_01_ids_of_the_history_come_back_to_kimis_form(raw):
    checked = check_messages([USER, asks(raw), answers(raw)])
    assert checked[1]["tool_calls"][0]["id"] == "functions.search:3"
    assert checked[2]["tool_call_id"] == "functions.search:3"


def test_bug_02_ids_of_the_history_without_separators():
    checked = check_messages([USER, asks("functionssearch5"), answers("functions.search:5")])
    assert checked[1]["tool_calls"][0]["id"] == checked[2]["tool_call_id"] == "functions.search:5"


def test_bug_03_foreign_ids_of_the_history_are_numbered():
    checked = check_messages(
        [
            USER,
            asks("functions.search:0"),
            answers("functions.search:0"),
            asks("toolu_01AbC"),
            answers("toolu_01AbC"),
            asks("4f8e4b2a-9d7c-4c55", "read_file", {"path": "é"}),
            answers("4f8e4b2a-9d7c-4c55"),
        ]
    )
    made = [message["tool_calls"][0]["id"] for message in checked if message["role"] == "assistant"]
    assert made == ["functions.search:0", "functions.search:1", "functions.read_file:2"]
    told = [message["tool_call_id"] for message in checked if message["role"] == "tool"]
    assert told == made
    assert checked[5]["tool_calls"][0]["function"]["arguments"] == '{"path": "é"}'
    assert count_calls(checked) == 3


@pytest.mark.parametrize("given", [None, "", "  ", {}])
def test_a_call_without_arguments_has_empty_ones(given):
    checked = check_messages([USER, asks("a", arguments=given)])
    assert checked[1]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_bug_27_reasoning_in_either_field_or_in_none():
    for message, expected in (
        ({}, None),
        ({"reasoning_content": "R"}, "R"),
        ({"reasoning": "R"}, "R"),
        ({"reasoning": "R", "reasoning_content": "old"}, "R"),
        ({"reasoning_content": None}, None),
    ):
        checked = check_messages([USER, asks("a", **message)])
        assert checked[1].get("reasoning_content") == expected


def test_thoughts_in_the_content_of_an_answer_are_its_reasoning():
    for content, expected in (
        ("<think>R</think>A", ("R", "A")),
        ("\n<think>R</think>\n\nA</think>", ("R", "\n\nA</think>")),
        ("see <think>R</think>A", (None, "see <think>R</think>A")),
        ("<think>R", (None, "<think>R")),
    ):
        checked = check_messages([USER, {"role": "assistant", "content": content}])[1]
        assert (checked.get("reasoning_content"), checked["content"]) == expected
    given = {"role": "assistant", "content": "<think>R</think>A", "reasoning": "S"}
    assert check_messages([given])[0]["content"] == "<think>R</think>A"
    assert check_messages([{"role": "user", "content": "<think>R</think>A"}])[0] == {
        "role": "user",
        "content": "<think>R</think>A",
    }


def test_what_clients_add_to_our_answers_is_no_error():
    extras = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "index": 0}
    assert check_messages([USER, {"role": "assistant", "content": "A"} | extras])[1] == {
        "role": "assistant",
        "content": "A",
    }


def test_bug_38_half_a_surrogate_pair_is_replaced_everywhere():
    checked = check_messages(
        [
            {"role": "user", "content": "a\ud83d", "name": "n\ud83d"},
            asks("functions.search:0", arguments='{"query": "\ud83d"}', reasoning="r\ude00"),
            answers("x\ud83d", [{"type": "text", "text": "\ud83d\ude00"}]),
        ]
    )
    json.dumps(checked, ensure_ascii=False).encode()
    assert checked[0]["content"] == "a\ufffd"
    assert checked[2]["content"] == "😀"
    declared = check_tools([tool("a", {"p\ud83d": {"description": "\ud83d"}})])
    json.dumps(declared, ensure_ascii=False).encode()


@pytest.mark.parametrize("messages", [[], ()])
def test_bug_111_no_messages_are_refused(messages):
    with pytest.raises(RequestError, match="messages is empty"):
        check_messages(messages)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ({"role": "user"}, "messages is a dict, expected a list"),
        ("Hi", "messages is a str"),
        (None, "messages is a NoneType"),
        ([USER, "Hi"], r"messages\[1\] is 'Hi', expected an object"),
        ([{"content": "Hi"}], r"messages\[0\].role is None, expected one of system"),
        ([{"role": "robot", "content": "Hi"}], r"messages\[0\].role is 'robot'"),
        ([{"role": "function", "name": "f", "content": ""}], "send role tool with tool_call_id"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5, expected a string"),
        ([{"role": "user", "content": {"text": "a"}}], r"messages\[0\].content is \{"),
        ([{"role": "user", "content": [5]}], r"messages\[0\].content\[0\] is 5"),
        (
            [{"role": "user", "content": [{"text": "a"}, {"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[1\] is of type 'image_url'; only text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is None"),
        ([{"role": "user", "contents": "a"}], "unknown field 'contents'; did you mean 'content'"),
        ([{"role": "user", "content": "", "name": 5}], r"messages\[0\].name is 5"),
        ([{"role": "tool", "content": ""}], r"messages\[0\].tool_call_id is None"),
        ([{"role": "user", "tool_calls": [1]}], "only an assistant calls"),
        ([{"role": "assistant", "tool_calls": "x"}], r"messages\[0\].tool_calls is 'x'"),
        ([{"role": "assistant", "tool_calls": [1]}], r"tool_calls\[0\] is 1"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], r"tool_calls\[0\].function is None"),
        ([asks("a", name="")], r"function.name is ''"),
        ([asks("a", arguments=5)], r"function.arguments is 5, expected a string"),
        ([asks(5)], r"tool_calls\[0\].id is 5"),
        ([{"role": "assistant", "reasoning": 5}], r"messages\[0\].reasoning is 5"),
    ],
)
def test_bug_129_malformed_messages_are_refused_by_name(messages, words):
    with pytest.raises(RequestError, match=words):
        check_messages(messages)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("x", "tools is 'x', expected a list"),
        ([1], r"tools\[0\] is of type None"),
        ([{"type": "web_search"}], r"tools\[0\] is of type 'web_search'; only the type function"),
        ([{"type": "function"}], r"tools\[0\].function.name is None"),
        ([tool("a b")], r"tools\[0\].function.name is 'a b'"),
        ([tool("<|im_end|>")], "expected 1 to 256 letters"),
        ([SEARCH, SEARCH], r"tools\[1\] and tools\[0\] are both called 'search'"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": []}}],
            r"parameters is \[\], expected a JSON Schema object",
        ),
        (
            [{"type": "function", "function": {"name": "a", "description": 1}}],
            "description is no string",
        ),
        ([tool("a")] * 600, "600 tools, at most 512"),
        ([tool("a", {"p": {"x": {1}}})], "holds a set"),
    ],
)
def test_malformed_tools_are_refused_by_name(tools, words):
    with pytest.raises(RequestError, match=words):
        check_tools(tools)


def test_a_schema_too_deep_is_refused():
    schema: dict = {}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="deeper than 64"):
        check_tools([tool("a", {"p": schema})])


def test_bug_11_tool_choice_none_declares_nothing_and_a_forced_one_is_declared():
    assert choose_tools(TOOLS, None) == choose_tools(TOOLS, "auto") == TOOLS
    assert choose_tools(TOOLS, "none") == []
    named = {"type": "function", "function": {"name": "search"}}
    assert choose_tools(TOOLS, named) == choose_tools(TOOLS, "required") == TOOLS
    assert [tool["function"]["name"] for tool in forced_tools(TOOLS, named)] == ["search"]
    assert forced_tools(TOOLS, "required") == TOOLS
    assert forced_tools(TOOLS, "auto") == forced_tools(TOOLS, None) == []
    for tools, choice, message in (
        ([], "required", "there are no tools"),
        (TOOLS, "all", "tool_choice is 'all', expected"),
        (TOOLS, {"type": "function"}, "expected"),
        (TOOLS, {"type": "function", "function": {"name": "serch"}}, "did you mean 'search'"),
    ):
        with pytest.raises(RequestError, match=message):
            forced_tools(tools, choice)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"query": "x"}', "search"),
        ('{"path": "x"}', "read_file"),
        ('{"city": "x", "days": 3}', "get_weather"),
        ('{"days": true}', None),
        ('{"query": 5}', None),
        ('{"query": "x", "more": 1}', None),
        ("{}", "get_weather"),
        ("[]", None),
        ("{", None),
        ("[" * 100_000, None),
    ],
)
def test_arguments_that_fit_one_tool_name_it(arguments, expected):
    assert tool_for(arguments, check_tools(TOOLS)) == expected


def test_arguments_that_fit_two_tools_name_none():
    one, two = (
        tool("one", {"a": {"enum": [1, 2]}}),
        tool("two", {"a": {"type": ["integer", "null"]}}),
    )
    assert tool_for('{"a": 1}', [one, two]) is None
    assert tool_for('{"a": 3}', [one, two]) == "two"
    free = tool("free", additionalProperties=True)
    assert tool_for('{"b": 3}', [one, free]) == "free"
    assert tool_for('{"b": 3}', [one, tool("odd", {"b": {"type": "date"}})]) == "odd"
