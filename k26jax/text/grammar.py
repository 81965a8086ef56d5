"""Grammars over a model's vocabulary, by llguidance, and one answer's way through its grammar."""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from k26jax.errors import RequestError
from k26jax.text.markers import TOOL_MARKERS
from k26jax.text.structured import STRUCTURED, Structure, source_of
from k26jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

T = TypeVar("T")
_KEPT = 64
_STACK_BYTES = 1 << 29
_MAX_REASON = 300
_ALL = np.uint32(0xFFFFFFFF)


class Grammars:
    """Compiles what requests ask for; the library is loaded with the first of them.

    Args:
        tokenizer: None for a model without one.
        vocab_size: rows of the model's embedding; ids without a token are never allowed.
        eos_ids: what may come where a grammar is satisfied, and nowhere else in it.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._executor: llguidance.LLExecutor | None = None

    @property
    def words(self) -> int:
        """Words of a mask."""
        return -(-self._vocab_size // 32)

    def check(self, structure: Structure, where: str = STRUCTURED) -> None:
        """Raises RequestError, about `where`, unless a checked structure can be held to.

        Its grammar is compiled and kept for a while.
        """
        self._require_all(where)
        self._gate(structure, where)
        self._matcher(source_of(structure, where), where)

    def guide(self, structure: Structure) -> Guide:
        """Returns the way of an answer that has no token yet.

        Raises: as `check`.
        """
        self._require_all(STRUCTURED)
        gate = self._gate(structure, STRUCTURED)
        matcher = self._matcher(source_of(structure), STRUCTURED)
        return Guide(matcher.deep_copy(), self._eos_ids, gate)

    def fill(self, matchers: list[tuple[llguidance.LLMatcher, int]], masks: np.ndarray) -> None:
        """Writes the masks of matchers to the rows that they are paired with, side by side.

        For the engine's thread alone.

        Args:
            masks: uint32 [rows, words], contiguous.
        """
        import llguidance

        if self._executor is None:
            self._executor = llguidance.LLExecutor()
        size = masks.shape[1] * masks.itemsize
        live = [(matcher, row) for matcher, row in matchers if not matcher.is_error()]
        if live:
            self._executor.unsafe_compute_mask_ptr(live, masks.ctypes.data, size, masks.shape[0])
        for matcher, row in matchers:
            # A grammar that outgrew the library's limits has no next token: the answer ends.
            if matcher.is_error():
                masks[row] = 0
                _set_bits(masks[row], self._eos_ids)

    def _require_all(self, where: str) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise RequestError(
                f"{where} needs llguidance; install with: pip install 'k26jax[server]'"
            )
        if self._tokenizer is None:
            raise RequestError(f"{where} needs a tokenizer, and this model's folder holds none")
        if not self._eos_ids:
            raise RequestError(
                f"{where} needs an end token, and neither the model's config nor its tokenizer "
                "names one"
            )

    def _gate(self, structure: Structure, where: str) -> Gate | None:
        assert self._tokenizer is not None
        special_ids = self._tokenizer.special_ids
        for kind in ("after", "at"):
            name = structure.get(kind)
            if name is None:
                continue
            if name not in special_ids:
                raise RequestError(f"{where}.{kind} is {name!r:.80}, no control token of the model")
            if kind == "after":
                banned = {*special_ids.values(), *self._eos_ids}
            else:
                banned = {special_ids[name] for name in TOOL_MARKERS if name in special_ids}
            free = np.full(self.words, _ALL)
            _set_bits(free, banned - {special_ids[name]}, False)
            return Gate(special_ids[name], kind == "at", free)
        return None

    def _matcher(self, source: str, where: str) -> llguidance.LLMatcher:
        """Returns the matcher of a grammar at its start, to be copied.

        Raises: RequestError with the library's reason.
        """
        with self._lock:
            if source in self._compiled:
                self._compiled.move_to_end(source)
                return self._compiled[source]
            matcher = _with_deep_stack(lambda: self._compile(source))
            if matcher.is_error():
                # What follows the first line of a paragraph is the state of the parser.
                reason = " ".join(matcher.get_error().partition("\n<state>")[0].split())
                raise RequestError(f"{where}: {reason[:_MAX_REASON]}")
            self._compiled[source] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return matcher

    def _compile(self, source: str) -> llguidance.LLMatcher:
        import llguidance

        matcher = llguidance.LLMatcher(self._load(), source, log_level=0)
        if not matcher.is_error():
            # Some grammars show only here that no text fits them.
            mask = np.zeros(self.words, np.uint32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return matcher

    def _load(self) -> llguidance.LLTokenizer:
        """Returns the vocabulary as the library reads it: bytes of every id, control tokens apart.

        Cost: half a second for Kimi's, once.
        """
        import llguidance

        if self._vocabulary is None:
            assert self._tokenizer is not None
            wrapper = llguidance.TokenizerWrapper(
                _Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids[0])
            )
            self._vocabulary = llguidance.LLTokenizer(wrapper, eos_token=list(self._eos_ids))
        return self._vocabulary


# Of a model that no folder gave.
NO_GRAMMARS = Grammars(None, 0, ())


class _Away(Enum):
    """Places outside of the grammar: before its gate, and where it is broken or has ended."""

    FREE = 0
    OVER = 1


@dataclass(frozen=True, eq=False)
class Gate:
    """Where a grammar begins.

    Fields:
        token: behind it, or with it if it is the grammar's first (`is_part`).
        free: the mask of what may come before.
    """

    token: int
    is_part: bool
    free: np.ndarray


class Guide:
    """One answer's way through its grammar.

    A place is a matcher that is never changed any more, so those of a tree's nodes can stand side
    by side, or it is outside of the grammar.
    """

    def __init__(
        self, start: llguidance.LLMatcher, eos_ids: tuple[int, ...], gate: Gate | None = None
    ):
        self._start, self._gate = start, gate
        self._eos_ids = frozenset(eos_ids)
        self._place: Any = _Away.FREE if gate else start

    def advance(self, tokens: Iterable[int]) -> None:
        """Moves on by tokens that were emitted; behind one that the grammar has not, all is over.

        Such a token comes only where another rule forbids all that the grammar allows.
        """
        for token in tokens:
            self._place = self._next(self._place, token)

    def collect(
        self, token_ids: Sequence[int], parents: Sequence[int], masks: np.ndarray, first: int
    ) -> list[tuple[llguidance.LLMatcher, int]]:
        """Returns the matchers of a tree's nodes, with the rows of their masks, for `fill`.

        Masks before the gate are written at once. Rows stay as they are where a node's path breaks
        the grammar, or has ended: it is not accepted, or nothing is read behind it.

        Args:
            token_ids, parents: node by node, a parent before its children; the root, row 0, is the
                newest token, which this guide has taken already. Padding has no parent.
            masks: uint32 [rows, words].
            first: the root's row.
        """
        places = [self._place]
        for token, parent in zip(token_ids[1:], parents[1:], strict=True):
            places.append(self._next(places[parent], token) if parent >= 0 else _Away.OVER)
        found = []
        for row, place in enumerate(places, first):
            if place is _Away.FREE:
                assert self._gate is not None
                masks[row] = self._gate.free
            elif place is not _Away.OVER:
                found.append((place, row))
        return found

    def _next(self, place: Any, token: int) -> Any:
        """Returns the place after a token."""
        if place is _Away.OVER or token in self._eos_ids:
            return _Away.OVER
        if place is _Away.FREE:
            gate = self._gate
            assert gate is not None
            if token != gate.token:
                return place if _has_bit(gate.free, token) else _Away.OVER
            # A copy for each node: no two rows may be filled by one matcher.
            place = self._start.deep_copy()
            if not gate.is_part:
                return place
        else:
            place = place.deep_copy()
        return place if place.try_consume_tokens([token]) else _Away.OVER


class _Vocabulary:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int):
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids.values())

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns a text's ids."""
        shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(shown)


def _with_deep_stack(call: Callable[[], T]) -> T:
    """Returns what a call gives in a thread of its own.

    The library follows references and rules by recursion and does not count: a chain of a thousand
    would overflow a usual stack, which ends the process. The lengths that are allowed fit in this.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()), name="k26jax-grammar")
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return found[0]


def _has_bit(words: np.ndarray, token: int) -> bool:
    return bool(words[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def _set_bits(words: np.ndarray, tokens: Iterable[int], is_set: bool = True) -> None:
    for token in tokens:
        bit = np.uint32(1 << token % 32)
        words[token // 32] = words[token // 32] | bit if is_set else words[token // 32] & ~bit
