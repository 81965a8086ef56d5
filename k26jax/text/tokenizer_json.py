"""`tokenizer.json` of the `tokenizers` library: GLM, DeepSeek and other siblings of Kimi."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

from k26jax.errors import TokenizerError
from k26jax.text.vocabulary import Vocabulary, read_json

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARKER = re.compile(r"<.+>|\[.+\]", re.DOTALL)


def byte_characters() -> dict[str, int]:
    """Returns the byte-level alphabet: the character that stands for each of the 256 bytes.

    Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    characters = {chr(value): value for value in printable}
    return characters | {chr(256 + index): value for index, value in enumerate(others)}


def decoder_types(decoder: Any) -> Iterator[str]:
    """Yields the type of a decoder and of every decoder inside it."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders") or []:
            yield from decoder_types(inner)


def piece_decoder(file: str, decoder: Any) -> Callable[[str], bytes]:
    """Returns the function from a vocabulary entry to the bytes it stands for.

    A leading space of SentencePiece vocabularies is kept: ids are the middle of a text as often
    as its start, and a piece must not mean different bytes in the two places.

    Raises:
        TokenizerError: the decoder is neither byte-level nor of the SentencePiece kind.
    """
    types = set(decoder_types(decoder))
    if "ByteLevel" in types:
        values = byte_characters()

        def from_byte_level(piece: str) -> bytes:
            if any(char not in values for char in piece):
                return piece.encode()
            return bytes(values[char] for char in piece)

        return from_byte_level
    if types & {"ByteFallback", "Metaspace"}:

        def from_sentencepiece(piece: str) -> bytes:
            match = _BYTE_FALLBACK.fullmatch(piece) if "ByteFallback" in types else None
            return bytes([int(match[1], 16)]) if match else piece.replace("\u2581", " ").encode()

        return from_sentencepiece
    raise TokenizerError(
        f"{file} has the decoder {sorted(types) or None}, expected ByteLevel, ByteFallback or "
        "Metaspace; other kinds do not give the bytes of a single token"
    )


def is_control(token: dict[str, Any]) -> bool:
    """Whether an added token is a control token rather than an addition to the vocabulary.

    DeepSeek flags `<｜User｜>` as not special although it opens a turn, and adds single letters
    the same way: besides the flag, the brackets tell.
    """
    return bool(token.get("special")) or _MARKER.fullmatch(token["content"]) is not None


def load_tokenizer_json(path: Path) -> Vocabulary:
    """Returns the vocabulary of a `tokenizer.json`.

    Raises:
        TokenizerError: the file is damaged, of an unsupported kind, or two names share an id.
    """
    content = read_json(path)
    added = content.get("added_tokens") or []
    controls = [token for token in added if is_control(token)]
    # The library finds added tokens anywhere in a text; without them their names are text.
    plain_content = content | {
        "added_tokens": [token for token in added if not is_control(token)],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    marked = _build(path.name, content)
    vocabulary = marked.get_vocab(with_added_tokens=True)
    special_ids = {token["content"]: vocabulary[token["content"]] for token in controls}
    plain = _build(path.name, plain_content)
    # Some versions number added tokens in order, so those that stay may have got other ids.
    plain_vocabulary = plain.get_vocab(with_added_tokens=True)
    renumber = {
        plain_vocabulary[token["content"]]: vocabulary[token["content"]]
        for token in plain_content["added_tokens"]
    }
    unknown = (content.get("model") or {}).get("unk_token")
    forbidden = frozenset(id for name, id in special_ids.items() if name != unknown)

    def encode_ordinary(text: str) -> list[int]:
        return [renumber.get(id, id) for id in plain.encode(text, add_special_tokens=False).ids]

    def encode_marked(text: str) -> list[int]:
        return marked.encode(text, add_special_tokens=False).ids

    return Vocabulary(
        table=_bytes_table(path.name, content, vocabulary),
        special_ids=special_ids,
        hidden_ids=frozenset(
            special_ids[token["content"]] for token in controls if token.get("special")
        ),
        encode_plain=without_controls(encode_ordinary, special_ids, forbidden),
        encode_marked=encode_marked,
    )


def without_controls(
    encode: Callable[[str], list[int]], names: Iterable[str], forbidden: frozenset[int]
) -> Callable[[str], list[int]]:
    """Returns an encoder that never gives a forbidden id for a name inside a text.

    Control names can be entries of a word-level or unigram vocabulary as well. Cutting each such
    name after its first character keeps the vocabulary from matching it whole.
    """
    inside = re.compile(
        "|".join(
            f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})" for name in names if len(name) > 1
        )
    )

    def encode_cut(text: str) -> list[int]:
        ids = encode(text)
        if inside.pattern and not forbidden.isdisjoint(ids):
            ids = [id for part in inside.split(text) for id in encode(part)]
        return ids

    return encode_cut


def _build(file: str, content: dict[str, Any]) -> LibraryTokenizer:
    try:
        tokenizer = LibraryTokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises plain Exception for every defect
        raise TokenizerError(
            f"{file} is not a tokenizer that the tokenizers library can read: {error}"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _bytes_table(file: str, content: dict[str, Any], vocabulary: dict[str, int]) -> list[bytes]:
    decode = piece_decoder(file, content.get("decoder"))
    added = {token["content"] for token in content.get("added_tokens") or []}
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    owner: dict[int, str] = {}
    for piece, id in vocabulary.items():
        if id in owner:
            raise TokenizerError(f"{file}: {owner[id]!r} and {piece!r} share the id {id}")
        owner[id] = piece
        table[id] = piece.encode() if piece in added else decode(piece)
    return table
