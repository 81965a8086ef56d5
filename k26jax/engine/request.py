"""What a caller asks for: sampling parameters and one sequence's request. No JAX here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, TypeGuard, TypeVar

from k26jax.config import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
)
from k26jax.errors import ContextLengthError, RequestError, nearest
from k26jax.text.stop import check_stop
from k26jax.text.structured import check_structure

T = TypeVar("T", bound=type)


def refuse_unknown(owner: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raises TypeError that names an unknown keyword and the nearest known one."""
    for name in given:
        if name not in known:
            raise TypeError(
                f"{owner} got an unexpected keyword {name!r}{nearest(name, known)}"
                f"; known: {', '.join(known)}"
            )


def named_keywords(cls: T) -> T:
    """Returns a dataclass whose constructor names the nearest field for an unknown keyword."""
    known = [item.name for item in fields(cls)]
    plain: Callable[..., None] = cls.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, list(kwargs), known)
        plain(self, *args, **kwargs)

    cls.__init__ = init
    return cls


@named_keywords
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    n: sequences for the prompt; the i-th uses seed + i.
    temperature: 0 is greedy.
    top_k: the k most likely tokens; 0 or -1: all.
    top_p: the smallest set of likely tokens with this probability, after top_k.
    min_p: tokens at least this likely relative to the most likely one.
    seed: with one seed a request gives the same tokens in any batch and under any algorithm; None:
        derived from the engine's seed and the number of the request.
    stop: strings that end the text; they are left out unless include_stop_str_in_output.
    stop_token_ids: ids that end it, besides the model's own end tokens.
    ignore_eos: go on past the model's own end tokens.
    max_tokens: None: until the context is full.
    skip_special_tokens: leave control tokens out of the text.
    logprobs: tell each token's log-probability, and those of this many of the most likely tokens
        there, at most 20; 0: of the token alone. They are those of the target's own distribution,
        before temperature, filters, penalties and biases.
    min_tokens: no stop id is chosen before that many tokens; stop strings are looked for in the
        text after them.
    presence_penalty: taken from the logits of all tokens that the output has.
    frequency_penalty: taken from them for every time that the output has them.
    repetition_penalty: divides positive logits of tokens of prompt and output, multiplies others.
    logit_bias: added to the logits, by token id (or its decimal digits).
    bad_words: words that are not written in the spellings that the tokenizer has for them, with
        and without a space before; other tokens that make the same text are not seen.
    structured_outputs: the shape that the text must have, with one of json (a schema), json_object
        (True), regex, choice (texts) or grammar (Lark or GBNF); needs llguidance. Further, "after"
        or "at": the control token behind which, or with which, the shape begins. In a chat it
        begins behind the thoughts.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: Mapping[str, Any] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = field(default=None, metadata={"unsupported": True})
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.metadata.get("unsupported") and value != item.default:
                raise RequestError(
                    f"{item.name} = {value!r} is not supported yet; leave it at {item.default!r}"
                )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} = {getattr(self, name)!r}, expected true or false")
        check_structure(self.structured_outputs)
        self._check_shape()
        _in_range("n", self.n, 1, 128)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, -1, 1 << 30)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p = 0 keeps no token; for greedy decoding set temperature = 0")
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, 1 << 30)
        if self.seed is not None:
            _in_range("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        check_stop(self.stop_strings)
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        is_list = isinstance(ids, Sequence) and not isinstance(ids, str)
        if not is_list or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise RequestError(f"stop_token_ids = {ids!r}, expected a list of integers")
        self._check_extras()

    def _check_extras(self) -> None:
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _in_range("min_tokens", self.min_tokens, 0, 1 << 30)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}; lower it"
            )
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_bias(self.logit_bias)
        words = () if self.bad_words is None else self.bad_words
        if not is_listing(words) or any(not isinstance(word, str) or not word for word in words):
            raise RequestError(f"bad_words = {words!r:.80}, expected a list of words")

    @property
    def biases(self) -> dict[int, float]:
        """The biases by token id, whatever the ids were given as."""
        return {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}

    def _check_shape(self) -> None:
        """Raises RequestError for what could forbid all that a shape allows."""
        given = {
            "ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens,
            "bad_words": self.bad_words,
        }  # fmt: skip
        for name, value in given.items():
            if value and self.structured_outputs is not None:
                raise RequestError(
                    f"{name} does not go with structured_outputs: where only an end token or one "
                    "word may come, nothing would be left; leave one of them out"
                )

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        if not isinstance(self.stop, Sequence):
            raise RequestError(f"stop = {self.stop!r}, expected a string or a list of strings")
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def checked_params(params: Any) -> SamplingParams:
    """Returns sampling parameters, or the default ones for None.

    Raises: RequestError for anything else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is {params!r:.80}, expected SamplingParams(...)")
    return params


def _in_range(name: str, value: Any, low: float, high: float) -> None:
    number = int if isinstance(low, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, number) or not low <= value <= high:
        kind = "an integer" if isinstance(low, int) else "a number"
        raise RequestError(f"{name} = {value!r:.80}, expected {kind} from {low} to {high}")


def check_bias(bias: Any) -> None:
    """Raises RequestError unless a logit_bias is a table of ids and biases that is not too large.

    An id may be written in digits, as JSON's names are.
    """
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias = {bias!r:.80}, expected a table of token ids and biases")
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(bias)} tokens, at most {MAX_LOGIT_BIAS} are possible; send fewer"
        )
    seen: set[int] = set()
    for token, value in bias.items():
        is_id = isinstance(token, int) and not isinstance(token, bool)
        # Python turns no more than 4300 digits into a number, and no id has as many as 20.
        is_digits = (
            isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20
        )
        if not is_id and not is_digits:
            raise RequestError(f"logit_bias has the key {token!r:.80}, expected a token id")
        if int(token) in seen:
            raise RequestError(f"logit_bias has token id {int(token)} twice; send it once")
        seen.add(int(token))
        _in_range(f"logit_bias[{int(token)}]", value, -100.0, 100.0)


@dataclass(frozen=True)
class Request:
    """One sequence to generate, checked against the model.

    max_tokens: tokens it may emit; at least 1.
    stop_ids: ids that end it.
    seed: key of its noise.
    bad_words: spellings of the bad words, as token ids.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def adjusts(self) -> bool:
        """Whether its logits are changed before a token is chosen."""
        params = self.params
        is_penalized = params.presence_penalty or params.frequency_penalty
        return bool(
            is_penalized
            or params.repetition_penalty != 1
            or params.logit_bias
            or self.bad_words
            or (params.min_tokens and self.stop_ids)
        )

    @property
    def has_extras(self) -> bool:
        """Whether its steps are those of a program with extras."""
        return self.adjusts or self.params.logprobs is not None


def is_listing(value: Any) -> TypeGuard[Iterable[Any]]:
    """Whether a value holds items in their order; text, bytes, objects and sets do not."""
    unordered = (str, bytes, bytearray, memoryview, Mapping, Set)
    has_items = isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0
    return has_items and not isinstance(value, unordered)


def token_ids_of(value: Any, name: str, *, expected: str = "a list of token ids") -> list[int]:
    """Returns a list of token ids as integers.

    Raises: RequestError that calls the value `name`, for anything else.
    """
    items = list(value) if is_listing(value) else None
    if items is None or any(isinstance(i, bool) or not isinstance(i, Integral) for i in items):
        raise RequestError(f"{name} is {value!r:.80}, expected {expected}")
    return [int(item) for item in items]


def spellings(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Returns the token ids that write each of some words, with and without a space before.

    A spelling that ends with another one of its word is left out: the shorter one covers it.

    Raises: RequestError that names a word of too many tokens, or says that there are too many.
    """
    found: list[list[int]] = []
    for word in words:
        own: list[list[int]] = []
        for text in (word.lstrip(" ") or word, " " + word.lstrip(" ")):
            ids = encode(text)
            if not any(ids[-len(other) :] == other for other in own):
                own.append(ids)
        longest = max(map(len, own))
        if longest > MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words has {word!r:.80}, which is {longest} tokens; at most "
                f"{MAX_BAD_WORD_TOKENS} are possible; send a shorter part of it"
            )
        found += [ids for ids in own if ids not in found]
    if len(found) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(words)} words with {len(found)} spellings, at most "
            f"{MAX_BAD_WORDS} are possible; send fewer"
        )
    return found


def make_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    context_length: int,
    eos_ids: Sequence[int],
    seed: int,
    bad_words: Sequence[Sequence[int]] = (),
) -> Request:
    """Returns a checked request.

    Args:
      bad_words: what `spellings` gives for those of the parameters.

    Raises: RequestError for an empty prompt or ids outside the vocabulary, ContextLengthError for
      a prompt that leaves no room.
    """
    ids = tuple(int(token) for token in prompt_token_ids)
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    for kind, tokens in (
        ("prompt", ids),
        ("stop_token_ids", tuple(params.stop_token_ids or ())),
        ("logit_bias", tuple(params.biases)),
    ):
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        if outside:
            raise RequestError(
                f"{kind} holds token id {outside[0]}, outside the vocabulary of {vocab_size}"
            )
    room = context_length - len(ids)
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens and the context {context_length}; no room is left "
            "to generate; shorten the prompt or raise context_length"
        )
    stop_ids = tuple(params.stop_token_ids or ())
    if not params.ignore_eos:
        stop_ids += tuple(eos_ids)
    stop_ids = tuple(dict.fromkeys(stop_ids))
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(
            f"{len(stop_ids)} stop token ids, the model's own included; at most {MAX_STOP_IDS}"
        )
    return Request(
        prompt_token_ids=ids,
        params=params,
        max_tokens=min(params.max_tokens or room, room),
        stop_ids=stop_ids,
        seed=params.seed if params.seed is not None else seed,
        bad_words=tuple(tuple(word) for word in bad_words),
    )
