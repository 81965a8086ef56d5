"""The control tokens that give an answer its structure: thoughts, and calls of tools."""

from __future__ import annotations

from enum import Enum

from k26jax.text.tokenizer import Tokenizer

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Marker(Enum):
    """What a marker begins or ends; its value is the name of Kimi's control token."""

    THINK_OPEN = THINK_OPEN
    THINK_CLOSE = THINK_CLOSE
    SECTION_BEGIN = "<|tool_calls_section_begin|>"
    SECTION_END = "<|tool_calls_section_end|>"
    CALL_BEGIN = "<|tool_call_begin|>"
    ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"


THINK_MARKERS = (Marker.THINK_OPEN, Marker.THINK_CLOSE)
TOOL_MARKERS = tuple(marker.value for marker in Marker if marker not in THINK_MARKERS)
# Spellings that are no control token of any Kimi tokenizer and that answers contain nonetheless.
SPELLED = {
    "<|tool_call_section_begin|>": Marker.SECTION_BEGIN,
    "<|tool_call_section_end|>": Marker.SECTION_END,
}


def markers_of(tokenizer: Tokenizer) -> dict[int, Marker]:
    """Returns the marker that each control token of a tokenizer is, if it is one."""
    ids = tokenizer.special_ids
    return {ids[marker.value]: marker for marker in Marker if marker.value in ids}
