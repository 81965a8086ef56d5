"""Draft trees as objects of a stream, for who asks to see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from k26jax.engine.output import StepTrace
from k26jax.server.errors import invalid
from k26jax.server.protocol import Asked
from k26jax.server.settings import ServerSettings
from k26jax.text.tokenizer import Tokenizer


def check_trees(body: Asked, settings: ServerSettings) -> None:
    """Raises ApiError for trees that cannot be shown."""
    if not body.draft_trees:
        return
    if not settings.draft_trees:
        raise invalid(
            "draft_trees needs a server that was started with --draft-trees",
            "unsupported_parameter",
            param="draft_trees",
        )
    if not body.stream:
        raise invalid("draft_trees is given without stream", param="draft_trees")


def trees_record(
    index: int, traces: Sequence[StepTrace], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Returns the trees of a choice's steps: tokens as text, root first, and the accepted path."""

    def text(token: int) -> str:
        if tokenizer is None:
            return str(token)
        return tokenizer.decode([token], skip_special_tokens=False)

    trees = [
        {"tokens": list(map(text, trace.token_ids)), "parents": trace.parents, "path": trace.path}
        for trace in traces
    ]
    return {"index": index, "trees": trees}
