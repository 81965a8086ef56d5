"""Kimi's `tiktoken.model`: reads the rank file and encodes with Kimi's split pattern."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path

import tiktoken

from k26jax.errors import TokenizerError
from k26jax.text.vocabulary import TokenizerSettings, Vocabulary

SPECIAL_SLOTS = 256
MAX_CHUNK_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

# Alternatives in the order of tokenization_kimi.py; `&&` is character-class intersection.
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

_LONG_RUN = re.compile(rf"\s{{{MAX_RUN_CHARS + 1},}}|\S{{{MAX_RUN_CHARS + 1},}}")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Returns token bytes to rank; the ranks are exactly 0 to N-1 and cover all 256 bytes.

    Raises:
        TokenizerError: a line is not `base64 rank`, a token or rank comes twice, a rank is
            missing, or a single byte has no token. Names the line number where there is one.
    """
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path.name} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        token, rank = _parse_line(path.name, number, line)
        if rank in line_of_rank:
            raise TokenizerError(
                f"{path.name} line {number}: rank {rank} was already given on line "
                f"{line_of_rank[rank]}; ranks must be unique"
            )
        if token in ranks:
            raise TokenizerError(
                f"{path.name} line {number}: token {token!r} was already given on line "
                f"{line_of_rank[ranks[token]]}; tokens must be unique"
            )
        ranks[token], line_of_rank[rank] = rank, number
    gap = next((rank for rank in range(len(ranks)) if rank not in line_of_rank), None)
    if gap is not None:
        raise TokenizerError(
            f"{path.name}: rank {gap} is missing; expected 0 to {len(ranks) - 1} without gaps"
        )
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{path.name}: {len(missing)} single bytes have no token (first: 0x{missing[0]:02x}); "
            "the file is cut short or is not a byte-level vocabulary"
        )
    return ranks


def _parse_line(file: str, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split(b" ")
    try:
        token, rank = base64.b64decode(fields[0], validate=True), fields[1]
    except (binascii.Error, IndexError):
        token, rank = b"", b""
    if len(fields) != 2 or not token or not rank.isdigit():
        raise TokenizerError(
            f"{file} line {number} is {line[:60]!r}, expected base64 of the token's bytes, "
            "one space, its rank; copy the file again from the model's repository"
        )
    return token, int(rank)


def name_special_slots(settings: TokenizerSettings, first: int) -> tuple[dict[str, int], set[int]]:
    """Returns (name to id of the 256 slots from `first` up, ids that visible text leaves out).

    Raises:
        TokenizerError: a named token lies outside the slots.
    """
    names = {token.id: token for token in settings.added_tokens}
    for token in settings.added_tokens:
        if not first <= token.id < first + SPECIAL_SLOTS:
            raise TokenizerError(
                f"tokenizer_config.json gives {token.content!r} the id {token.id}, but "
                f"tiktoken.model leaves {first} to {first + SPECIAL_SLOTS - 1} for control tokens; "
                "the two files belong to different models"
            )
    special_ids, hidden = {}, set()
    for slot in range(first, first + SPECIAL_SLOTS):
        token = names.get(slot)
        name = token.content if token else f"<|reserved_token_{slot}|>"
        if name in special_ids:
            raise TokenizerError(f"tokenizer_config.json: {name!r} stands for two ids")
        special_ids[name] = slot
        if token is None or token.hidden:
            hidden.add(slot)
    return special_ids, hidden


def split_long(text: str) -> Iterator[str]:
    """Yields pieces of at most 400,000 characters with no run of more than 25,000.

    A run is white space only or non-space only; longer ones exhaust tiktoken's regex stack. The
    cuts are those of Kimi's own tokenizer, so long texts get the ids that it gives.
    """
    for start in range(0, len(text), MAX_CHUNK_CHARS):
        chunk = text[start : start + MAX_CHUNK_CHARS]
        done = 0
        for run in _LONG_RUN.finditer(chunk):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield chunk[done:cut]
                done = cut
        yield chunk[done:]


def load_tiktoken(path: Path, settings: TokenizerSettings) -> Vocabulary:
    """Returns the vocabulary of a rank file, its 256 control tokens right above the ranks.

    Raises:
        TokenizerError: see `read_ranks` and `name_special_slots`.
    """
    ranks = read_ranks(path)
    special_ids, hidden = name_special_slots(settings, len(ranks))
    encoding = tiktoken.Encoding(
        path.name, pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    longest_first = sorted(special_ids, key=len, reverse=True)
    marker = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode_plain(text: str) -> list[int]:
        return [token for piece in split_long(text) for token in encoding.encode_ordinary(piece)]

    def encode_marked(text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(marker.split(text)):
            ids += [special_ids[part]] if index % 2 else encode_plain(part)
        return ids

    table = [b""] * (len(ranks) + SPECIAL_SLOTS)
    for token, rank in ranks.items():
        table[rank] = token
    for name, slot in special_ids.items():
        table[slot] = name.encode()
    return Vocabulary(table, special_ids, frozenset(hidden), encode_plain, encode_marked)
