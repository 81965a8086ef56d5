"""Tokens to text, finish reason and metrics: nothing may depend on how tokens come in runs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k26jax.engine.output import CompletionOutput, RequestMetrics, Transcript
from k26jax.engine.request import SamplingParams, make_request

# Letters, pieces of several letters, a character cut in three, a control token.
TABLE = [b"a", b"b", b"c", b"ab", b"bc a", b"\xe4", b"\xb8", b"\xad", b"\xf0\x9f", b"\x98\x80"]
HIDDEN = len(TABLE)
EOS, OWN = HIDDEN + 1, 2
VOCABULARY = EOS + 1


class Table:
    """A tokenizer of TABLE; the last two ids are control tokens."""

    special_ids = {"<hid>": HIDDEN, "<end>": EOS}  # noqa: RUF012 - a table that tests read

    def is_hidden(self, id):
        return id >= HIDDEN

    def visible_bytes(self, ids, *, skip_special_tokens=True):
        controls = {HIDDEN: b"<hid>", EOS: b"<end>"}
        pieces = (TABLE[i] if i < HIDDEN else controls[i] for i in ids)
        return b"".join(
            piece
            for i, piece in zip(ids, pieces, strict=True)
            if i < HIDDEN or not skip_special_tokens
        )


def decode(ids, params) -> str:
    """The text of whole ids at once."""
    raw = Table().visible_bytes(ids, skip_special_tokens=params.skip_special_tokens)
    return raw.decode("utf-8", "replace")


def transcript(tokenizer=None, **params) -> Transcript:
    request = make_request(
        [0],
        SamplingParams(**params),
        vocab_size=VOCABULARY,
        context_length=1000,
        eos_ids=(EOS,),
        seed=0,
    )
    return Transcript(request, tokenizer or Table())


def push(target: Transcript, runs) -> tuple[str, list[int]]:
    """Returns all text and ids that the runs gave."""
    text, ids = "", []
    for run in runs:
        piece, taken = target.push(run)
        text += piece
        ids += taken
    return text, ids


def expected(ids, params: SamplingParams):
    """(text, ids, finish reason, stop reason) by looking at the whole text after each token."""
    own = tuple(params.stop_token_ids or ())
    ends = own + (() if params.ignore_eos else (EOS,))
    for count, token in enumerate(ids, start=1):
        is_end = token in ends
        is_named = params.stop == "<end>" and token == EOS and params.skip_special_tokens
        if is_named:
            # A stop string that is a hidden token's name is found though its text is not shown.
            shown = "<end>" * params.include_stop_str_in_output
            return decode(ids[: count - 1], params) + shown, ids[:count], "stop", "<end>"
        hide_last = is_end and not params.include_stop_str_in_output
        text = decode(ids[: count - hide_last], params)
        if params.stop and params.stop in text:
            place = text.index(params.stop) + len(params.stop) * params.include_stop_str_in_output
            return text[:place], ids[:count], "stop", params.stop
        if is_end:
            return text, ids[:count], "stop", token if token in own else None
        if count == params.max_tokens:
            return text, ids[:count], "length", None
    return None


@given(
    ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=24),
    cuts=st.lists(st.booleans(), min_size=24, max_size=24),
    stop=st.sampled_from([None, "a", "bc", "ca", "abab", "\u4e2d", " a", "<end>"]),
    own=st.sampled_from([None, [OWN], [OWN, EOS]]),
    max_tokens=st.integers(1, 24),
    include=st.booleans(),
    ignore_eos=st.booleans(),
    skip=st.booleans(),
)
def test_every_partition_into_runs_gives_the_same(
    ids, cuts, stop, own, max_tokens, include, ignore_eos, skip
):
    params = SamplingParams(
        stop=stop,
        stop_token_ids=own,
        max_tokens=max_tokens,
        include_stop_str_in_output=include,
        ignore_eos=ignore_eos,
        skip_special_tokens=skip,
    )
    ids = (ids * 24)[:24]
    runs = [[]]
    for token, cut in zip(ids, cuts, strict=True):
        runs[-1].append(token)
        if cut:
            runs.append([])
    target = transcript(**{name: getattr(params, name) for name in params.__dataclass_fields__})
    text, taken = push(target, runs)
    found = (text, taken, target.finish_reason, target.stop_reason)
    assert found == expected(ids, params)
    assert (target.text, target.token_ids) == (text, taken)
    assert target.push([0, 1]) == ("", [])


@pytest.mark.parametrize(
    ("cap", "reason", "count"), [(5, "stop", 3), (2, "length", 2), (3, "stop", 3)]
)
def test_a_cap_hides_no_earlier_stop(cap, reason, count):
    """Bug log 43: one run of six tokens with a stop id in its middle."""
    target = transcript(max_tokens=cap)
    text, ids = target.push([0, 1, EOS, 2, 0, 1])
    assert (target.finish_reason, ids) == (reason, [0, 1, EOS][:count])
    assert text == "ab"


def test_a_stop_string_across_tokens_and_inside_a_run_is_cut_out():
    target = transcript(stop=["bcb"])
    assert target.push([0, 1]) == ("a", [0, 1])
    # "bc a" begins like the stop string and goes on otherwise: what was held comes out.
    assert target.push([4]) == ("bbc a", [4])
    assert target.push([1, 2, 1, 0, 0]) == ("", [1, 2, 1])
    assert (target.finish_reason, target.stop_reason) == ("stop", "bcb")
    assert target.text == "abbc a"


def test_held_text_comes_out_when_the_cap_is_met():
    target = transcript(stop=["bcb"], max_tokens=2)
    assert target.push([1, 2]) == ("bc", [1, 2])
    assert target.finish_reason == "length"


def test_half_a_character_at_the_end_is_shown_as_one_mark():
    target = transcript(max_tokens=3)
    assert target.push([5]) == ("", [5])
    assert target.push([6]) == ("", [6])
    assert target.push([0]) == ("\ufffda", [0])
    whole = transcript(max_tokens=3)
    assert push(whole, [[5], [6, 7]])[0] == "\u4e2d"


@pytest.mark.parametrize(
    ("params", "reason"),
    [({}, None), ({"stop_token_ids": [EOS]}, EOS), ({"stop_token_ids": [OWN]}, None)],
)
def test_the_models_own_end_token_is_no_stop_reason(params, reason):
    target = transcript(**params)
    target.push([0, EOS, 0])
    assert (target.finish_reason, target.stop_reason) == ("stop", reason)
    assert target.token_ids == [0, EOS]


def test_ignore_eos_goes_on_and_own_stop_ids_still_end():
    target = transcript(ignore_eos=True, stop_token_ids=[OWN])
    text, ids = target.push([0, EOS, 1, OWN, 0])
    assert (text, ids) == ("ab", [0, EOS, 1, OWN])
    assert (target.finish_reason, target.stop_reason) == ("stop", OWN)


def test_without_a_tokenizer_ids_and_reasons_are_the_same():
    request = transcript().request
    target = Transcript(request, None)
    assert target.push([0, EOS, 1]) == ("", [0, EOS])
    assert target.finish_reason == "stop"


def test_metrics_leave_the_first_token_to_the_prefill():
    metrics = RequestMetrics(
        ttft_seconds=0.5, e2e_seconds=2.5, generated_tokens=9, target_forwards=4
    )
    assert metrics.tokens_per_second == 4.0
    assert metrics.accept_length == 2.0
    lone = RequestMetrics(ttft_seconds=0.5, e2e_seconds=0.5, generated_tokens=1)
    assert (lone.tokens_per_second, lone.accept_length) == (0.0, 0.0)


def test_a_record_is_strict_json_with_its_usage():
    output = CompletionOutput(0, "a\u4e2d", [0, 5, 6, 7], "length", None, RequestMetrics())
    record = json.loads(json.dumps(output.record(3), allow_nan=False))
    assert record["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (record["text"], record["token_ids"]) == ("a\u4e2d", [0, 5, 6, 7])
    assert record["finish_reason"] == "length"
    assert set(record["metrics"].values()) == {0}
