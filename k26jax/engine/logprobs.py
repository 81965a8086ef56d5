"""What a caller is told of a token's probability. No JAX here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from k26jax.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON has not


@dataclass(frozen=True)
class Logprob:
    """What the target thought of a token at a place of the output.

    logprob: before temperature, filters, penalties and biases; at least LOWEST.
    rank: its place among all tokens there; the most likely one's is 1.
    decoded_token: its text, a control token's name; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


def read_logprobs(
    found: Sequence[Any], count: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """Returns what is told of one token, the token itself first, then the most likely ones.

    Args:
      found: the token, its log-probability and rank, the most likely tokens and theirs.
      count: how many of the most likely tokens are asked for.
    """
    told = {}
    for token, value, place in _entries(found, count):
        text = None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
        # The first entry of a token stays: the token itself may be among the most likely.
        told.setdefault(token, Logprob(_finite(value), place, text))
    return told


def _entries(found: Sequence[Any], count: int) -> Iterator[tuple[int, float, int]]:
    token, value, place, ids, values = found
    yield int(token), float(value), int(place)
    for i in range(min(count, len(ids))):
        yield int(ids[i]), float(values[i]), i + 1


def _finite(value: float) -> float:
    """Returns a value that JSON can hold; NaN counts as the lowest."""
    return value if value >= LOWEST else LOWEST
