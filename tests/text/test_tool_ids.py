"""Ids of calls in every spelling that clients and models give them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k26jax.text.tool_ids import CallIds, resolve


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("functions.read_file:0", ["read_file"], ("read_file", 0)),
        ("functions_read_file_3", ["read_file"], ("read_file", 3)),
        ("functions_f_2_0_1", ["f", "f_2", "f_2_0"], ("f_2_0", 1)),
        ("functions_f_2_0", ["f", "f_2"], ("f_2", 0)),
        ("functions_f_2_0", ["f_2_0"], ("f_2_0", None)),
        ("functions-get-weather-12", ["get_weather", "get-weather"], ("get-weather", 12)),
        ("read_file:7", ["read_file"], ("read_file", 7)),
    ],
)
def test_bug_01_sanitised_ids_name_their_tool(text, names, expected):
    assert resolve(text, names) == expected


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("functionsexec5", ["exec"], ("exec", 5)),
        ("functionsexec5", ["exec", "exec5"], ("exec5", None)),
        ("functionsexec55", ["exec", "exec5"], ("exec5", 5)),
        ("functionsreadfile2", ["read_file", "read"], ("read_file", 2)),
        ("functionsreadfile2", ["read_file", "readfile"], None),
        ("functionsexec5", ["run"], None),
        ("functions exec5", ["exec"], None),
    ],
)
def test_bug_02_ids_without_separators_go_to_the_longest_name(text, names, expected):
    assert resolve(text, names) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("search:2", ("search", 2)),
        (" functions.search:2\n", ("search", 2)),
        ("functions.a.b:2", ("a.b", 2)),
        ("functions.x:2", ("functions.x", 2)),
        ("functions.unknown:4", ("unknown", 4)),
        ("unknown:4", None),
        (":2", None),
        ("2", None),
        ("", None),
        (" \n", None),
        ("functions.sea\nrch:2", None),
        ("functions.search:99999999999999999999", None),
        ("functions.:1", None),
        ("functions.", None),
    ],
)
def test_bug_05_ids_without_prefix_are_no_exception(text, expected):
    assert resolve(text, ["search", "a.b", "functions.x"]) == expected


@given(st.text("functions.ab_-: 0129\n", max_size=24))
def test_bug_05_no_text_is_an_exception(text):
    found = resolve(text, ["a", "b", "ab", "a_b", "functions"])
    assert found is None or found[0]
    assert resolve(text, []) is None or text.strip().startswith("functions.")


def test_history_keeps_what_the_model_wrote_and_numbers_the_rest():
    ids = CallIds()
    assert ids.from_history("functions.a:0", "a") == "functions.a:0"
    assert ids.from_history("functions_a_4", "a") == "functions.a:4"
    assert ids.from_history("call_9f", "b") == "functions.b:2"
    assert ids.from_history("", "b") == "functions.b:3"
    assert ids.from_history("toolu_7", "a") == "functions.a:5"
    assert ids.answered("call_9f") == ids.answered("call-9f") == "functions.b:2"
    assert ids.answered("functions_a_4") == ids.answered("functions.a:4") == "functions.a:4"
    assert ids.answered("nobody") == "nobody"


def test_two_calls_of_one_answer_never_share_an_id():
    ids = CallIds(made=3)
    made = [ids.from_model("a", index) for index in (0, 0, None, 5, 5)]
    assert made[:3] == ["functions.a:0", "functions.a:4", "functions.a:5"]
    assert len(set(made)) == 5
