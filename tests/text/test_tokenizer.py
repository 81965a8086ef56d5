"""Kimi's tiktoken.model: pattern, merges, control tokens, long inputs, damaged files."""

import json
import subprocess
import sys

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_folder import FIRST, RANKS, write_folder

from k26jax.errors import TokenizerError
from k26jax.text.tiktoken_model import KIMI_PATTERN, split_long
from k26jax.text.tokenizer import load_tokenizer

CHECK_PROMPTS = [
    ("The three primary colors of light are red, green, and", 12),
    ("To solve the equation 3x + 7 = 22, first subtract 7 from both sides:", 22),
]
SAMPLES = [
    "def f(x):\n    return x  # done\n\n\n   y = 12345\r\n\r\n",
    "中国四大发明是造纸术、abc中文Word don't I'LL we'Ve",
    "가나다 ひらがな カタカナ漢字ー e\u0301\u00a0x \u2003 y  ",
    "😀👩‍👩‍👧 <|im_end|> [BOS]\t\t\x00\x7f",
]


def split_pieces(text: str) -> list[str]:
    """The pattern under the `regex` package: a third engine beside tiktoken's and Oniguruma."""
    return [match.group() for match in regex.finditer(KIMI_PATTERN, text, regex.V1)]


def merge(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Byte-pair encoding from its definition: always the lowest-ranked pair, leftmost first."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([value]) for value in piece]
    while True:
        pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        known = [(ranks[pair], i) for i, pair in enumerate(pairs) if pair in ranks]
        if not known:
            return [ranks[part] for part in parts]
        i = min(known)[1]
        parts[i : i + 2] = [pairs[i]]


@pytest.mark.parametrize(("prompt", "count"), CHECK_PROMPTS)
def test_kimi_pattern_cuts_the_check_prompts_into_the_published_counts(tmp_path, prompt, count):
    pieces = {piece.encode() for piece in split_pieces(prompt)}
    ranks = RANKS + sorted(pieces - set(RANKS))
    ids = load_tokenizer(write_folder(tmp_path, ranks)).encode(prompt)
    assert len(ids) == len(split_pieces(prompt)) == count
    assert b"".join(ranks[id] for id in ids).decode() == prompt


@pytest.mark.parametrize(
    "pieces",
    [
        ["123", "456", "7", "a", " ", "12"],
        ["中国", "abc", "中文", "Word", " don't", " I'LL", " we'Ve"],
        ["ABC", " ABc", "De", "$x", "_y", "\tz"],
        ["(x", "):\n", "   ", " return", " x", " ", " #", " done", "\n\n\n", "  ", " y"],
        ["a", " +=\r\n", "  \n", "  "],
        ["カタカナ", "漢字", "ー", " é", " e\u0301"],
    ],
)
def test_kimi_pattern_cuts_as_its_eight_alternatives_say(pieces):
    assert split_pieces("".join(pieces)) == pieces


@settings(max_examples=100)
@given(st.one_of(st.text(), st.sampled_from(SAMPLES), st.text("aA1'sé中 \n\r.\t", max_size=30)))
def test_encode_is_split_then_lowest_rank_first(trained, text):
    ranks = {trained.token_bytes(id): id for id in range(3840)}
    expected = [id for piece in split_pieces(text) for id in merge(piece.encode(), ranks)]
    assert trained.encode(text) == expected
    assert trained.decode(expected) == text


def test_layout_of_ids(tokenizer):
    assert tokenizer.vocab_size == FIRST + 256
    assert len(tokenizer.special_ids) == 256
    assert sorted(tokenizer.special_ids.values()) == list(range(FIRST, FIRST + 256))
    assert tokenizer.bos_id == FIRST
    assert tokenizer.eos_ids == (FIRST + 1, FIRST + 2)
    assert tokenizer.special_ids[f"<|reserved_token_{FIRST + 5}|>"] == FIRST + 5
    assert [tokenizer.token_bytes(id) for id in range(FIRST)] == RANKS
    assert tokenizer.token_bytes(FIRST + 2) == b"<|im_end|>"
    assert [id for id in range(FIRST + 256) if tokenizer.is_special(id)] == list(
        range(FIRST, FIRST + 256)
    )
    shown = {FIRST + 22, FIRST + 23}
    assert {id for id in range(FIRST, FIRST + 256) if not tokenizer.is_hidden(id)} == shown


def test_bug_21_names_of_control_tokens_in_plain_text_stay_text(tokenizer):
    for name in tokenizer.special_ids:
        text = f"a{name}\n {name}{name}"
        ids = tokenizer.encode(text)
        assert not any(map(tokenizer.is_special, ids)), name
        assert tokenizer.decode(ids) == text


def test_bug_21_the_documented_switch_turns_names_into_ids(tokenizer):
    for name, id in tokenizer.special_ids.items():
        ids = tokenizer.encode(f"hello{name}{name} t", allow_special=True)
        assert ids == [*tokenizer.encode("hello"), id, id, *tokenizer.encode(" t")]
        assert tokenizer.decode(ids, skip_special_tokens=False) == f"hello{name}{name} t"
    text = "no markers <|im_en|>"
    assert tokenizer.encode(text, allow_special=True) == tokenizer.encode(text)


def test_the_longest_of_two_control_names_wins(folder):
    names = {str(FIRST): "[BOS]", str(FIRST + 1): "[EOS]", str(FIRST + 2): "[EOS][EOS]"}
    added(**{id: {"content": name} for id, name in names.items()})(folder)
    ids = load_tokenizer(folder).encode("[EOS][EOS][EOS]", allow_special=True)
    assert ids == [FIRST + 2, FIRST + 1]


def test_no_begin_token_is_added(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.encode("he") == [RANKS.index(b"he")]


@pytest.mark.parametrize("allow_special", [False, True])
def test_bug_38_lone_surrogates_become_replacement_characters(tokenizer, allow_special):
    ids = tokenizer.encode("a\ud83d b\udc00<\ud83d\ude00>", allow_special=allow_special)
    assert tokenizer.decode(ids) == "a\ufffd b\ufffd<😀>"


def test_bug_41_unknown_ids_decode_to_nothing(tokenizer):
    size = tokenizer.vocab_size
    assert [tokenizer.token_bytes(id) for id in (-1, size, size + 7, 10**9)] == [b""] * 4
    assert tokenizer.decode([104, size, FIRST + 1, 105, 10**9, FIRST + 22]) == "hi<think>"


@given(
    st.lists(st.tuples(st.sampled_from("a \n"), st.integers(1, 60_000)), max_size=9),
    st.integers(0, 3),
)
def test_long_texts_are_cut_as_kimi_cuts_them(runs, offset):
    text = "b " * offset + "".join(char * count for char, count in runs)
    expected, piece, run = [], "", 0
    for index, char in enumerate(text):
        run = run + 1 if piece and char.isspace() == piece[-1].isspace() else 1
        if (index and index % 400_000 == 0) or run > 25_000:
            expected.append(piece)
            piece, run = "", 1
        piece += char
    expected += [piece] if text else []
    assert list(split_long(text)) == expected


def test_very_long_runs_do_not_exhaust_the_stack(tokenizer):
    text = "a" * 450_000 + " " * 60_000 + "<|im_end|>"
    ids = tokenizer.encode(text, allow_special=True)
    assert ids.pop() == tokenizer.special_ids["<|im_end|>"]
    assert tokenizer.decode(ids) == text.removesuffix("<|im_end|>")


def line(number: int, content: str):
    def damage(folder):
        lines = (folder / "tiktoken.model").read_text().splitlines()
        lines[number - 1] = content
        (folder / "tiktoken.model").write_text("\n".join(lines))

    return damage


def config(**fields):
    def damage(folder):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def added(**entries):
    return config(added_tokens_decoder=entries)


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (line(3, "not base64! 2"), "tiktoken.model line 3 "),
        (line(3, "Ag=="), "tiktoken.model line 3 "),
        (line(3, "Ag== x"), "tiktoken.model line 3 "),
        (line(3, "Ag== -2"), "tiktoken.model line 3 "),
        (line(3, "Ag== 2 2"), "tiktoken.model line 3 "),
        (line(3, " 2"), "tiktoken.model line 3 "),
        (line(3, "Ag== 7"), "line 8: rank 7 was already given on line 3"),
        (line(3, "Bw== 2"), "line 8: token b'\\\\x07' was already given on line 3"),
        (line(3, "Ag== 9999"), "rank 2 is missing"),
        (line(3, "emVicmE= 2"), r"1 single bytes have no token \(first: 0x02\)"),
        (write("tiktoken.model", b""), "256 single bytes have no token"),
        (write("tokenizer_config.json", b"{"), "tokenizer_config.json cannot be read"),
        (write("tokenizer_config.json", b"\xff\xfe"), "tokenizer_config.json cannot be read"),
        (write("tokenizer_config.json", b"[]"), "holds a list, expected an object"),
        (remove("tokenizer_config.json"), "no tokenizer_config.json"),
        (remove("tiktoken.model"), "neither tiktoken.model nor tokenizer.json"),
        (config(eos_token="<|no|>"), "'<|no|>' as eos_token"),
        (config(bos_token=7), "bos_token is 7"),
        (config(added_tokens_decoder=[1]), "added_tokens_decoder is not an object"),
        (added(**{"x": {"content": "<a>"}}), "added token 'x'"),
        (added(**{str(FIRST): {"special": True}}), f"added token '{FIRST}'"),
        (added(**{"3": {"content": "<a>"}}), "'<a>' the id 3"),
        (added(**{str(FIRST + 256): {"content": "<a>"}}), "belong to different models"),
        (
            added(**{str(FIRST): {"content": "<a>"}, str(FIRST + 1): {"content": "<a>"}}),
            "share an id or a name",
        ),
        (
            added(**{str(FIRST): {"content": "<a>"}, f"0{FIRST}": {"content": "<b>"}}),
            "share an id or a name",
        ),
        (added(**{str(FIRST): {"content": f"<|reserved_token_{FIRST + 1}|>"}}), "two ids"),
    ],
)
def test_damaged_files_are_refused_by_name(folder, damage, message):
    damage(folder)
    with pytest.raises(TokenizerError, match=message.replace("|", r"\|")) as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)


def test_vocabulary_larger_than_the_model_is_refused(folder):
    assert load_tokenizer(folder, FIRST + 256).vocab_size == FIRST + 256
    assert load_tokenizer(folder, FIRST + 300).vocab_size == FIRST + 256
    with pytest.raises(TokenizerError, match=f"{FIRST + 256} ids.* vocab_size is {FIRST + 255}"):
        load_tokenizer(folder, FIRST + 255)


def test_bug_22_python_files_in_the_folder_are_never_run(folder):
    mark = folder / "was_run"
    (folder / "tokenization_kimi.py").write_text(f"open({str(mark)!r}, 'w')\nraise SystemExit(3)\n")
    config(auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]})(folder)
    assert load_tokenizer(folder).encode("he") == [RANKS.index(b"he")]
    assert not mark.exists()


def test_text_package_imports_no_jax():
    code = (
        "import sys, k26jax.text.detokenize, k26jax.text.stop; "
        "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'flax')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_trained_tokenizer_has_kimi_layout(trained):
    assert trained.vocab_size == 4096
    names = {"[BOS]": 3840, "[EOS]": 3841, "<|im_end|>": 3842, "<|im_middle|>": 3857}
    names |= {"<think>": 3862, "</think>": 3863, "[UNK]": 4094, "[PAD]": 4095}
    names |= {"<|tool_call_end|>": 3855, "<|reserved_token_3845|>": 3845}
    assert {name: trained.special_ids[name] for name in names} == names
    assert (trained.bos_id, trained.eos_ids) == (3840, (3841, 3842))
    singles = {trained.token_bytes(id) for id in range(256)}
    assert singles == {bytes([value]) for value in range(256)}


def test_trained_tokenizer_round_trips_and_compresses_heldout_text(trained, checkpoints):
    text_bytes = tokens = 0
    lines = (checkpoints / "heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    for prompt in (json.loads(line)["prompt"] for line in lines):
        ids = trained.encode(prompt)
        assert trained.decode(ids) == prompt
        text_bytes += len(prompt.encode())
        tokens += len(ids)
    assert len(lines) == 20
    assert 2.8 < text_bytes / tokens < 4.0
