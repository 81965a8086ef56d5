"""tokenizer.json of siblings: byte-level, byte-fallback and word vocabularies built here."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from k26jax.errors import TokenizerError
from k26jax.text.tokenizer import load_tokenizer
from k26jax.text.tokenizer_json import byte_characters

TEXTS = ["hello world, hello there", "naïve 中国 😀 text", "def f(x): return x"] * 5


def save(folder, library: Tokenizer, **config):
    library.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def byte_level() -> Tokenizer:
    """Byte-level like DeepSeek's: letters as plain added tokens, an unflagged turn marker."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(TEXTS, trainer)
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens([AddedToken("Ω"), AddedToken("né"), AddedToken("<｜User｜>")])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def loaded(library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte_level")
    return save(folder, library, bos_token="<s>", eos_token="</s>")


def test_byte_characters_are_the_byte_level_alphabet():
    assert sorted(byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_characters().values()) == list(range(256))
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("\x00 \n\x7f\xa0\xad", "é中😀"):
        shown = pieces.pre_tokenize_str(text)[0][0]
        assert bytes(byte_characters()[char] for char in shown) == text.encode()


def test_byte_level_file_gives_the_library_s_ids_without_begin_token(library, loaded):
    for text in TEXTS:
        assert loaded.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert loaded.vocab_size == library.get_vocab_size()
    assert loaded.bos_id == library.token_to_id("<s>")
    assert loaded.eos_ids == (library.token_to_id("</s>"),)


@settings(max_examples=100)
@given(st.one_of(st.text(), st.text("Ωné<s>/｜User a", max_size=20)))
def test_byte_level_round_trip_and_no_control_ids_from_text(loaded, text):
    ids = loaded.encode(text)
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(loaded.token_bytes, ids)) == text.encode()
    assert not any(map(loaded.is_special, ids))


def test_bug_21_control_tokens_by_flag_or_by_brackets(library, loaded):
    names = ["<s>", "</s>", "<｜User｜>"]
    assert loaded.special_ids == {name: library.token_to_id(name) for name in names}
    assert [loaded.is_hidden(loaded.special_ids[name]) for name in names] == [True, True, False]
    for name in names:
        assert loaded.decode(loaded.encode(f"a{name} b"), skip_special_tokens=False) == f"a{name} b"
        marked = loaded.encode(f"a{name}b", allow_special=True)
        assert marked == [*loaded.encode("a"), loaded.special_ids[name], *loaded.encode("b")]
    # An added letter outside the byte alphabet is vocabulary; control tokens before it keep its id.
    for letters in ("Ω", "né"):
        assert loaded.encode(letters) == [library.token_to_id(letters)]
        assert loaded.token_bytes(library.token_to_id(letters)) == letters.encode()


def test_bug_38_lone_surrogates_become_replacement_characters(loaded):
    assert loaded.decode(loaded.encode("a\ud83d b")) == "a\ufffd b"
    assert loaded.encode("\ud83d\ude00") == loaded.encode("😀")


def byte_fallback(decoder) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "i")]
    library = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoder
    library.add_special_tokens(["<unk>"])
    return library


def test_byte_fallback_pieces_are_bytes_and_spaces(tmp_path):
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = save(tmp_path, byte_fallback(decoder))
    ids = tokenizer.encode("hi hi 😀")
    assert [tokenizer.token_bytes(id) for id in ids] == [
        b"h", b"i", b" hi", b" ", b"\xf0", b"\x9f", b"\x98", b"\x80",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "hi hi 😀"
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, ())


def test_metaspace_keeps_the_space_and_has_no_byte_pieces(tmp_path):
    tokenizer = save(tmp_path, byte_fallback(decoders.Metaspace()))
    assert tokenizer.token_bytes(tokenizer.encode(" hi")[0]) == b" hi"
    assert tokenizer.token_bytes(1) == b"<0x00>"


def test_bug_21_control_names_that_are_words_of_the_vocabulary(tmp_path):
    words = ["<unk>", "<end>", "a", "b", "<", "end>"]
    library = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<unk>", "<end>"])
    tokenizer = save(tmp_path, library)
    assert tokenizer.encode("a <end> b") == [2, 4, 5, 3]
    assert tokenizer.encode("a <end> b", allow_special=True) == [2, 1, 3]
    assert tokenizer.encode("zebra") == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Nothing"}}, "not a tokenizer that the tokenizers library can read"),
        ({"decoder": None}, "decoder None, expected ByteLevel"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece"),
    ],
)
def test_damaged_or_unsupported_files_are_refused(tmp_path, library, change, message):
    content = json.loads(library.to_str()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_two_pieces_with_one_id_are_refused(tmp_path, library):
    content = json.loads(library.to_str())
    content["model"]["vocab"]["!"] = content["model"]["vocab"]["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="share the id"):
        load_tokenizer(tmp_path)


def test_vocabulary_larger_than_the_model_is_refused(tmp_path, library):
    library.save(str(tmp_path / "tokenizer.json"))
    size = library.get_vocab_size()
    assert load_tokenizer(tmp_path, size).vocab_size == size
    with pytest.raises(TokenizerError, match=f"{size} ids"):
        load_tokenizer(tmp_path, size - 1)
