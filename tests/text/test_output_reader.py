"""Tokens to pieces: endings, markers and positions, for every way of cutting tokens into runs."""

import json

import pytest
from conversations import END, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st

from k26jax.text.markers import SPELLED, Marker, markers_of
from k26jax.text.reader import OutputReader
from k26jax.text.tokenizer import load_tokenizer

WORDS = [
    "a",
    "b",
    "</think>",
    "<think>",
    "k>",
    "\n\n",
    "é😀",
    "<|tool_call_end|>",
    END,
    "<|tool_call",
]
STOPS = ["k>", ">a", "</think>", "b\n", "think", "<|im_end|>", "nk>\n", "é", "aab"]


def reader(trained, markers=True, **options) -> OutputReader:
    options = {"max_tokens": 1000, "stop_ids": trained.eos_ids} | options
    return OutputReader(trained, markers=markers_of(trained) if markers else None, **options)


def shape(pieces):
    """Returns what a list of pieces says, neighbouring texts in one."""
    found: list[list] = []
    for piece in pieces:
        if piece.marker is None and found and found[-1][2] is None:
            found[-1][0] += piece.text
            found[-1][1] += piece.tokens
        else:
            found.append([piece.text, piece.tokens, piece.marker])
    return found


def cut(ids, cuts):
    runs = [[]]
    for index, token in enumerate(ids):
        runs[-1].append(token)
        if cuts[index % len(cuts)]:
            runs.append([])
    return runs


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=12),
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.lists(st.sampled_from(STOPS), max_size=2, unique=True),
    st.integers(1, 30),
    st.booleans(),
    st.booleans(),
)
def test_markers_change_nothing_about_text_and_end(
    trained, words, cuts, stop, limit, include, skip
):
    ids = [token for word in words for token in ids_of(trained, word)]
    options = {
        "stop": stop,
        "max_tokens": limit,
        "include_stop": include,
        "skip_special_tokens": skip,
    }
    whole, split, plain = (reader(trained, marked, **options) for marked in (True, True, False))
    expected = "".join(piece.text for piece in plain.push(ids) + plain.end("abort"))
    pieces = whole.push(ids) + whole.end("abort")
    runs = [piece for run in cut(ids, cuts) for piece in split.push(run)]
    assert shape(pieces) == shape(runs + split.end("abort"))
    for other in (split, plain):
        assert other.token_ids == whole.token_ids
        assert (other.finish_reason, other.stop_reason) == (whole.finish_reason, whole.stop_reason)
    # A marker comes whole or, where a stop string ends within its name, not at all.
    text = "".join(piece.text for piece in pieces)
    rest = expected.removeprefix(text)
    assert expected.startswith(text)
    if rest:
        assert whole.stop_reason is not None
        assert any(marker.value.startswith(rest) for marker in Marker)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert tokens == sorted(set(tokens))
    for piece in pieces:
        assert piece.text or piece.marker


def test_positions_are_those_of_the_tokens_that_begin_in_the_text(trained):
    ids = ids_of(trained, "import os\n</think>é😀 x")
    tag = ids.index(trained.special_ids["</think>"])
    pieces = shape(reader(trained).push(ids))
    assert pieces == [
        ["import os\n", tuple(range(tag)), None],
        ["</think>", (tag,), Marker.THINK_CLOSE],
        ["é😀 x", tuple(range(tag + 1, len(ids))), None],
    ]


def test_bug_33_no_start_of_a_stop_string_is_shown(trained):
    ids = [ids_of(trained, part) for part in ("text ", "##", "#E", "ND tail")]
    target = reader(trained, stop=["###END"])
    shown = ["".join(piece.text for piece in target.push(run)) for run in ids]
    assert shown == ["text ", "", "", ""]
    assert (target.finish_reason, target.stop_reason) == ("stop", "###END")
    target = reader(trained, stop=["###END"])
    runs = [*ids[:2], ids_of(trained, "other")]
    assert ["".join(p.text for p in target.push(run)) for run in runs] == ["text ", "", "##other"]


def test_bug_34_a_stop_at_the_second_of_twelve_tokens_of_a_run_is_found(trained):
    ids = [ids_of(trained, "a"), ids_of(trained, ";"), *[ids_of(trained, "b")] * 10]
    ids = [token for part in ids for token in part]
    target = reader(trained, stop=[";"])
    assert "".join(piece.text for piece in target.push(ids)) == "a"
    assert target.token_ids == ids[:2]


@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        ("b", False, [("a", None)]),
        ("</think>", False, [("ab", None)]),
        ("</think>", True, [("ab", None), ("</think>", Marker.THINK_CLOSE)]),
        ("nk>c", False, [("ab", None)]),
        ("nk>c", True, [("ab", None), ("</think>", Marker.THINK_CLOSE), ("c", None)]),
        ("bc", False, [("ab", None), ("</think>", Marker.THINK_CLOSE), ("cd", None)]),
        ("c", False, [("ab", None), ("</think>", Marker.THINK_CLOSE)]),
    ],
)
def test_bug_35_tags_are_never_shown_in_part(trained, stop, include, expected):
    ids = ids_of(trained, "ab</think>cd" + END)
    for runs in ([ids], [[token] for token in ids]):
        target = reader(trained, stop=[stop], include_stop=include)
        pieces = [piece for run in runs for piece in target.push(run)]
        assert [(text, marker) for text, _, marker in shape(pieces)] == expected
        assert target.finish_reason == "stop"


def test_bug_37_every_byte_token_before_the_end(trained):
    for value in range(256):
        # A tokenizer of tiktoken's kind has a token for each single byte.
        ids = [t for t in range(trained.vocab_size) if trained.token_bytes(t) == bytes([value])][:1]
        for tail in (END, "</think>a"):
            pieces = reader(trained).push(ids * 2 + ids_of(trained, tail))
            text = (bytes([value]) * 2).decode("utf-8", "replace")
            assert "".join(p.text for p in pieces) == text + tail.replace(END, "")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("name", ["<|im_user|>", END])
def test_bug_39_a_stop_string_that_names_a_hidden_token_stops_at_it(trained, name, include):
    ids = ids_of(trained, f"a{name}b")
    for stop_ids in ((), trained.eos_ids):
        target = reader(trained, stop=[name], include_stop=include, stop_ids=stop_ids)
        assert "".join(piece.text for piece in target.push(ids)) == "a" + name * include
        assert (target.finish_reason, target.stop_reason) == ("stop", name)
        assert len(target.token_ids) == 2
    # Written in letters it is found as any other text.
    target = reader(trained, stop=[name], include_stop=include)
    shown = "".join(piece.text for piece in target.push(trained.encode(f"a{name}b")))
    assert shown == "a" + name * include


@pytest.mark.parametrize("include", [False, True])
def test_bug_39_a_stop_id_ends_in_the_same_way(trained, include):
    ids = ids_of(trained, "a</think>b")
    target = reader(
        trained, stop_ids=[ids[1]], own_stop_ids=[ids[1]], include_stop=include, markers=False
    )
    assert "".join(piece.text for piece in target.push(ids)) == "a" + "</think>" * include
    assert (target.finish_reason, target.stop_reason) == ("stop", ids[1])


def test_bug_29_every_end_token_of_the_tokenizer_ends(trained):
    for name in ("[EOS]", END):
        target = reader(trained)
        target.push(ids_of(trained, f"a{name}b"))
        assert (target.finish_reason, target.stop_reason) == ("stop", None)
        assert len(target.token_ids) == 2


def test_bug_41_unknown_and_hidden_ids_count_and_show_nothing(trained):
    ids = [*ids_of(trained, "a[PAD]"), trained.vocab_size + 7, -1, *ids_of(trained, "b")]
    target = reader(trained)
    pieces = shape(target.push(ids))
    assert pieces == [["ab", (0, 4), None]]
    assert target.token_ids == ids


def test_spelled_markers_are_found_across_tokens_and_text_that_begins_like_one_is_not_lost(trained):
    text = "a<|tool_call_section_begin|>b<|tool_call_section_endless<|tool_call_section_end|>"
    ids = trained.encode(text)
    target = reader(trained, spelled=SPELLED)
    pieces = [piece for token in ids for piece in target.push([token])] + target.end("abort")
    assert [(t, m) for t, _, m in shape(pieces)] == [
        ("a", None),
        ("<|tool_call_section_begin|>", Marker.SECTION_BEGIN),
        ("b<|tool_call_section_endless", None),
        ("<|tool_call_section_end|>", Marker.SECTION_END),
    ]
    assert "".join(piece.text for piece in pieces) == text
    whole = reader(trained, spelled=SPELLED)
    assert shape(whole.push(ids) + whole.end("abort")) == shape(pieces)
    half = reader(trained, spelled=SPELLED)
    shown = half.push(trained.encode("x<|tool_call_sec")) + half.push(ids_of(trained, END))
    assert shape(shown)[0][0] == "x<|tool_call_sec"


def test_markers_that_a_tokenizer_hides_are_markers_all_the_same(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for token in config["added_tokens_decoder"].values():
        token["special"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    hiding = load_tokenizer(folder)
    ids = ids_of(hiding, "<think>ab</think>cd")
    for stop, expected in (
        ([], [["", Marker.THINK_OPEN], ["ab", None], ["", Marker.THINK_CLOSE], ["cd", None]]),
        (["d"], [["", Marker.THINK_OPEN], ["ab", None], ["", Marker.THINK_CLOSE], ["c", None]]),
        # What is hidden does not part a stop string.
        (["bc"], [["", Marker.THINK_OPEN], ["a", None]]),
    ):
        for runs in ([ids], [[token] for token in ids]):
            target = reader(hiding, stop=stop)
            pieces = [piece for run in runs for piece in target.push(run)]
            assert [[text, marker] for text, _, marker in shape(pieces)] == expected


def test_nothing_comes_after_the_end(trained):
    target = reader(trained)
    target.push(ids_of(trained, f"a{END}"))
    assert (target.push([1, 2]), target.end("abort"), target.finish_reason) == ([], [], "stop")
