"""Log-probabilities of an answer's tokens in the forms that OpenAI's two routes have for them.

Both list the tokens that begin in the text that is shown: none of a stop string, no hidden token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from k26jax.engine.logprobs import Logprob
from k26jax.text.tokenizer import Tokenizer


class TokenLogprobs:
    """What was told of the tokens of one sequence, by position.

    Args:
        count: how many of the most likely tokens are asked for beside each token.
    """

    def __init__(self, tokenizer: Tokenizer, count: int):
        self._tokenizer, self._count = tokenizer, count
        self._told: list[dict[int, Logprob]] = []

    def add(self, told: Sequence[dict[int, Logprob]] | None) -> None:
        """Takes what is told of the next tokens."""
        self._told += told or []

    def chat(self, positions: Iterable[int]) -> list[dict[str, Any]]:
        """Returns the entries of some tokens, as `logprobs.content` of a chat has them."""
        return [self._entry(self._told[position]) for position in positions]

    def completion(self, shown: Sequence[tuple[int, int]]) -> dict[str, list[Any]]:
        """Returns the `logprobs` of a text.

        Args:
            shown: the tokens' positions, and their first characters in the text.
        """
        told = [self._told[position] for position, _ in shown]
        return {
            "tokens": [self._name(next(iter(token))) for token in told],
            "token_logprobs": [next(iter(token.values())).logprob for token in told],
            "top_logprobs": [
                {self._name(id): item.logprob for id, item in token.items()} for token in told
            ],
            "text_offset": [offset for _, offset in shown],
        }

    def _entry(self, token: dict[int, Logprob]) -> dict[str, Any]:
        items = list(token.items())
        best = sorted((item for item in items), key=lambda item: item[1].rank)
        top = [item for item in best if item[1].rank <= self._count][: self._count]
        return self._shown(*items[0]) | {"top_logprobs": [self._shown(*item) for item in top]}

    def _shown(self, id: int, item: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(id)
        return {"token": item.decoded_token, "logprob": item.logprob, "bytes": list(raw)}

    def _name(self, id: int) -> str:
        """Returns a token's text; of part of a character its bytes, for names must differ."""
        raw = self._tokenizer.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined(parts: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Returns the `logprobs` of a text of those of its parts."""
    found: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for part in parts:
        for name, values in part.items():
            found[name] += values
    return found
