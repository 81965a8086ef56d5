"""Incremental decoding against one decode of all bytes, for every way of cutting the ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_folder import FIRST, RANKS

from k26jax.text.detokenize import Detokenizer

HIDDEN = [FIRST, FIRST + 1, FIRST + 2, FIRST + 100, FIRST + 255]
UNKNOWN = [FIRST + 256, FIRST + 1000, -1]
PARTS = [RANKS.index(token) for token in (b"\xf0\x9f", b"\x98\x80", b"\xe4\xb8", b"hell")]
ANY_ID = st.one_of(
    st.integers(0, FIRST - 1),
    st.integers(0x80, 0xFF),
    st.sampled_from(PARTS + HIDDEN + UNKNOWN + [FIRST + 22]),
)


@st.composite
def runs_of_ids(draw):
    """A list of runs of ids: valid text broken anywhere, mixed with arbitrary ids."""
    ids = draw(st.lists(ANY_ID, max_size=20)) + list(draw(st.text(max_size=6)).encode())
    ids += draw(st.lists(ANY_ID, max_size=4))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def whole_bytes(ids, skip: bool) -> bytes:
    """The bytes of all ids, from the test's own tables."""
    names = {FIRST: b"[BOS]", FIRST + 1: b"[EOS]", FIRST + 2: b"<|im_end|>", FIRST + 255: b"[PAD]"}
    names[FIRST + 100] = f"<|reserved_token_{FIRST + 100}|>".encode()
    shown = {FIRST + 22: b"<think>"} | ({} if skip else names)
    return b"".join(RANKS[id] if 0 <= id < FIRST else shown.get(id, b"") for id in ids)


@settings(max_examples=200)
@given(runs_of_ids(), st.booleans())
def test_every_partition_gives_the_text_of_the_whole(tokenizer, runs, skip):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    shown, ids = "", []
    for run in runs:
        shown += detokenizer.push(run)
        ids += run
        so_far = whole_bytes(ids, skip)
        text = so_far.decode("utf-8", "replace")
        # Nothing is held back but one unfinished character, which a decode now would replace.
        assert shown == text or shown + "\ufffd" == text
        if not so_far or so_far[-1] < 0x80:
            assert shown == text
    shown += detokenizer.flush()
    assert shown == whole_bytes(ids, skip).decode("utf-8", "replace")
    assert shown == tokenizer.decode(ids, skip_special_tokens=skip)


def test_bug_37_every_byte_alone_in_pairs_and_before_the_end_token(tokenizer):
    for first in range(256):
        detokenizer = Detokenizer(tokenizer)
        text = detokenizer.push([first]) + detokenizer.push([FIRST + 1]) + detokenizer.flush()
        assert text == bytes([first]).decode("utf-8", "replace")
        for second in range(256):
            detokenizer = Detokenizer(tokenizer)
            text = detokenizer.push([first]) + detokenizer.push([second]) + detokenizer.flush()
            assert text == bytes([first, second]).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["😀", "中", "é", "👩‍👩‍👧", "\U0010ffff"])
def test_no_character_is_split(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    pushed = [detokenizer.push([value]) for value in text.encode()]
    assert [piece for piece in pushed if piece] == list(text)
    assert detokenizer.flush() == ""


def test_emoji_from_two_merged_halves_and_a_broken_one(tokenizer):
    front, back, letter = PARTS[0], PARTS[1], ord("x")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([id]) for id in (front, back, front, letter)] == [
        "",
        "😀",
        "",
        "\ufffdx",
    ]
    assert (detokenizer.push([front]), detokenizer.flush()) == ("", "\ufffd")
    assert (detokenizer.push([back]), detokenizer.flush()) == ("\ufffd\ufffd", "")


def test_bug_41_control_tokens_are_hidden_unknown_ids_are_nothing(tokenizer):
    ids = [104, *HIDDEN, 105, *UNKNOWN, FIRST + 22]
    assert Detokenizer(tokenizer).push(ids) == "hi<think>"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push(ids[:4]) == (
        "h[BOS][EOS]<|im_end|>"
    )
    assert Detokenizer(tokenizer).push(iter([104, 105])) == "hi"
