"""Stop strings against a search through the whole text, for every way of cutting it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k26jax.errors import RequestError
from k26jax.text.stop import StopMatcher

STOPS = st.lists(st.text("ab#", min_size=1, max_size=4), max_size=4)


@st.composite
def pieces_of_text(draw):
    text = draw(st.text("ab#x", max_size=24))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def search(text: str, stop: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    """The definition: the earliest match of all, the shortest of those that start there."""
    for start in range(len(text)):
        matches = [item for item in stop if text.startswith(item, start)]
        if matches:
            found = min(matches, key=len)
            return text[: start + len(found) * include_stop], found
    return text, None


def run(matcher: StopMatcher, pieces) -> tuple[str, str | None]:
    shown, matched = "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown += text
        if matched is not None:
            return shown, matched
    text, matched = matcher.flush()
    return shown + text, matched


def common_start(texts: list[str]) -> str:
    """The longest text that all of them begin with."""
    first, last = min(texts), max(texts)
    return first[: next((i for i, a in enumerate(first) if a != last[i]), len(first))]


@settings(max_examples=300)
@given(pieces_of_text(), STOPS, st.booleans())
def test_every_partition_gives_the_whole_text_search(pieces, stop, include_stop):
    expected = search("".join(pieces), stop, include_stop)
    assert run(StopMatcher(stop, include_stop), pieces) == expected
    assert run(StopMatcher(stop, include_stop), "".join(pieces)) == expected


@settings(max_examples=100)
@given(st.text("abx", max_size=8), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_shows_at_once_all_that_no_continuation_can_take_back(text, stop):
    matcher = StopMatcher(stop)
    shown, matched = "", None
    for piece in text:
        new, matched = matcher.push(piece)
        shown += new
    tails = ["".join(tail) for size in range(4) for tail in itertools.product("abx", repeat=size)]
    outcomes = [search(text + tail, stop) for tail in tails]
    if len(set(outcomes)) == 1 and outcomes[0][1] is not None:
        assert (shown, matched) == outcomes[0]
    else:
        assert matched is None
        assert shown == common_start([seen for seen, _ in outcomes])


def test_bug_33_no_prefix_of_the_stop_string_is_shown():
    matcher = StopMatcher(["###END"])
    pushed = [matcher.push(piece) for piece in ("text", "##", "#E", "ND tail")]
    assert pushed == [("text", None), ("", None), ("", None), ("", "###END")]
    matcher = StopMatcher(["###END"])
    assert [matcher.push(piece)[0] for piece in ("text", "##", "other")] == ["text", "", "##other"]
    matcher = StopMatcher(["###END"])
    assert (matcher.push("text##"), matcher.flush()) == (("text", None), ("##", None))


def test_bug_34_a_stop_early_in_a_long_run_is_found():
    tokens = ["one ", "two STOP", *(f"word{index} " for index in range(10))]
    assert StopMatcher(["STOP"]).push("".join(tokens)) == ("one two ", "STOP")
    assert StopMatcher(["STOP"], include_stop=True).push("".join(tokens)) == (
        "one two STOP",
        "STOP",
    )


def test_ties_go_to_the_shortest_and_an_earlier_start_waits():
    assert StopMatcher(["abc", "ab"]).push("xabc") == ("x", "ab")
    for tail, expected in (("d", ("", "abcd")), ("z", ("a", "bc"))):
        matcher = StopMatcher(["bc", "abcd"])
        assert matcher.push("xabc") == ("x", None)
        assert matcher.push(tail) == expected
    matcher = StopMatcher(["bc", "abcd"])
    assert (matcher.push("xabc"), matcher.flush()) == (("x", None), ("a", "bc"))


def test_nothing_follows_a_match():
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", ".")
    assert (matcher.push("more"), matcher.flush()) == (("", "."), ("", "."))


def test_no_stop_strings_let_everything_through():
    matcher = StopMatcher([])
    assert (matcher.push("text"), matcher.flush()) == (("text", None), ("", None))


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ([""], r"stop\[0\] is ''"),
        (["a", ""], r"stop\[1\] is ''"),
        (["a", 7], r"stop\[1\] is 7"),
        ("abc", "stop is 'abc', expected a list"),
        (None, "stop is None, expected a list"),
        ([str(index) for index in range(17)], "stop has 17 strings, at most 16"),
    ],
)
def test_bad_stop_strings_are_refused(stop, message):
    with pytest.raises(RequestError, match=message):
        StopMatcher(stop)


def test_sixteen_stop_strings_are_served():
    stop = [f"<{index}>" for index in range(16)]
    assert StopMatcher(stop).push("a<15>") == ("a", "<15>")


def test_bug_38_half_a_surrogate_pair_as_stop_is_refused():
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        StopMatcher(["\ud83d"])
