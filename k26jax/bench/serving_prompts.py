"""Bodies of requests for `bench serving`: random ones of a length, or those of a file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k26jax.errors import RequestError

_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word
"""


@dataclass(frozen=True)
class Lengths:
    """How long random requests are.

    prompt: words of a prompt, or tokens where there is a vocabulary.
    output: tokens of an answer.
    ratio: the least share of both; each request's are drawn between that and the whole.
    vocabulary: prompts are token ids below this; None: words.
    """

    prompt: int = 256
    output: int = 128
    ratio: float = 1.0
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} length = {getattr(self, name)}, expected at least 1")
        if not 0 < self.ratio <= 1:
            raise RequestError(f"--random-range-ratio {self.ratio}, expected above 0, at most 1")
        if self.vocabulary is not None and self.vocabulary < 1:
            raise RequestError(f"--vocab-size {self.vocabulary}, expected at least 1")


def random_bodies(endpoint: str, count: int, lengths: Lengths, seed: int) -> list[dict[str, Any]]:
    """Returns bodies that one seed makes again; no two share the beginning of their prompts.

    Raises: RequestError for token ids in a chat.
    """
    if endpoint == "chat" and lengths.vocabulary is not None:
        raise RequestError("--vocab-size makes prompts of token ids, which a chat does not take")
    chance, words, bodies = random.Random(seed), _WORDS.split(), []
    for _ in range(count):
        size = chance.randint(_least(lengths.prompt, lengths.ratio), lengths.prompt)
        limit = chance.randint(_least(lengths.output, lengths.ratio), lengths.output)
        prompt: Any = " ".join(chance.choice(words) for _ in range(size))
        if lengths.vocabulary is not None:
            prompt = [chance.randrange(lengths.vocabulary) for _ in range(size)]
        bodies.append(_body(endpoint, prompt) | {"max_tokens": limit})
    return bodies


def _least(length: int, ratio: float) -> int:
    return max(round(length * ratio), 1)


def file_bodies(
    endpoint: str, count: int | None, path: Path, max_tokens: int
) -> list[dict[str, Any]]:
    """Returns bodies of a file of JSON lines; fewer lines than bodies are taken again.

    A line has prompt (text or token ids) or messages, and may have max_tokens; it may be a line of
    `k26jax batch`.

    Raises: RequestError that names the line.
    """
    bodies = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    bodies.append(_file_body(endpoint, line, f"{path} line {number}", max_tokens))
    except (OSError, UnicodeError) as error:
        raise RequestError(f"--prompt-file {path} cannot be read: {error}") from error
    if not bodies:
        raise RequestError(f"--prompt-file {path} holds no line")
    return [bodies[place % len(bodies)] for place in range(count or len(bodies))]


def _file_body(endpoint: str, line: str, where: str, max_tokens: int) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}") from error
    if isinstance(data, dict) and isinstance(data.get("body"), dict):
        data = data["body"]
    if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
        raise RequestError(f"{where}: expected an object with one of prompt and messages")
    limit = {"max_tokens": data.get("max_tokens") or max_tokens}
    if "messages" not in data:
        return _body(endpoint, data["prompt"]) | limit
    if endpoint != "chat":
        raise RequestError(f"{where} has messages; measure them with --endpoint chat")
    return {"messages": data["messages"]} | limit


def _body(endpoint: str, prompt: Any) -> dict[str, Any]:
    if endpoint == "chat":
        return {"messages": [{"role": "user", "content": prompt}]}
    return {"prompt": prompt}
