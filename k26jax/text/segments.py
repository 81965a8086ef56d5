"""A prompt in pieces: text, which is never more than text, and control tokens of the template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from k26jax.text.tokenizer import Tokenizer


class Segment(NamedTuple):
    """A piece of a prompt.

    is_control: the text is the name of one control token, which stands for its id.
    """

    text: str
    is_control: bool = False


def join_segments(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yields the same prompt with neighbouring texts in one, as tokens may cross their border."""
    texts: list[str] = []
    for segment in segments:
        if not segment.is_control:
            texts.append(segment.text)
            continue
        if any(texts):
            yield Segment("".join(texts))
        texts = []
        yield segment
    if any(texts):
        yield Segment("".join(texts))


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids; only control segments give control tokens."""
    ids: list[int] = []
    for segment in join_segments(segments):
        if segment.is_control:
            ids.append(tokenizer.special_ids[segment.text])
        else:
            ids += tokenizer.encode(segment.text)
    return ids


def split_controls(text: str, names: Iterable[str]) -> list[Segment]:
    """Returns a text in which control tokens are spelled out, cut at their names."""
    longest_first = sorted(names, key=len, reverse=True)
    if not longest_first:
        return [Segment(text)]
    parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return [Segment(part, index % 2 == 1) for index, part in enumerate(parts) if part]
