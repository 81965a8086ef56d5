"""Thoughts and answer: which of the two a piece of the output belongs to."""

from __future__ import annotations

from k26jax.text.markers import Marker
from k26jax.text.reader import Piece

_ENDS = (Marker.THINK_CLOSE, Marker.SECTION_BEGIN, Marker.CALL_BEGIN)


class ReasoningSplitter:
    """Tells thoughts from the rest, and counts their tokens.

    Thoughts end with their closing tag, or where calls of tools begin, which models do without the
    tag at times. A tag that opens what is open, or closes nothing, is dropped. Pieces of calls are
    not for this class: arguments may hold tags.

    Args:
        is_open: the prompt has opened the thoughts already.
    """

    def __init__(self, is_open: bool):
        self._is_open = is_open
        self._opened_at = 0
        self._closed_tokens = 0

    def push(self, piece: Piece) -> tuple[Piece, bool] | None:
        """Returns (piece, whether it is thought); None for what only separates the two."""
        if not self._is_open:
            if piece.marker is Marker.THINK_OPEN:
                self._is_open, self._opened_at = True, piece.tokens[0] + 1
            is_tag = piece.marker in (Marker.THINK_OPEN, Marker.THINK_CLOSE)
            return None if is_tag else (piece, False)
        if piece.marker is None or piece.is_spelled:
            return piece, True
        if piece.marker not in _ENDS:
            return None
        self._is_open = False
        self._closed_tokens += piece.tokens[0] - self._opened_at
        return None if piece.marker is Marker.THINK_CLOSE else (piece, False)

    def tokens(self, count: int) -> int:
        """Returns how many of an answer's first `count` tokens are thoughts, their tags aside."""
        open_tokens = max(0, count - self._opened_at) if self._is_open else 0
        return self._closed_tokens + open_tokens
