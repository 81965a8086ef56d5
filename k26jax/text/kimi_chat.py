"""Kimi K2.5's and K2.6's chat format, for folders that bring no template of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from k26jax.text.declare import declare_tools
from k26jax.text.messages import Message
from k26jax.text.segments import Segment
from k26jax.text.tools import Tool

NEEDED = (
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_OPENING = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}


def render_kimi(
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    thinking: bool = True,
    preserve_thinking: bool = False,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Returns a conversation as Kimi K2.6 learnt it: no begin token, no system prompt of its own.

    Reasoning of the past is left out, up to the last answer without calls, unless it is to be
    preserved: what a model thought between its calls is part of the turn that goes on.

    Args:
        messages: as `check_messages` returns them.
        tools: as `check_tools` returns them.
        thinking: the answer begins inside of its thoughts; without, after empty ones, as all
            answers before it do.
    """
    segments: list[Segment] = []
    if tools:
        segments += _turn("system", "tool_declare", [Segment(declare_tools(tools))])
    past = -1 if preserve_thinking else _last_answer(messages)
    for index, message in enumerate(messages):
        body = list(_body(message, keeps_thoughts=thinking and index > past))
        segments += _turn(message["role"], message.get("name") or message["role"], body)
    if add_generation_prompt:
        segments += _head("assistant", "assistant")
        segments += _thoughts() if not thinking else [Segment("<think>", True)]
    return segments


def _last_answer(messages: Sequence[Message]) -> int:
    """Returns the index of the last assistant message without calls; -1 if there is none."""
    answers = (
        index
        for index in reversed(range(len(messages)))
        if messages[index]["role"] == "assistant" and not messages[index].get("tool_calls")
    )
    return next(answers, -1)


def _head(role: str, name: str) -> list[Segment]:
    opening = _OPENING.get(role, "<|im_system|>")
    return [Segment(opening, True), Segment(name), Segment("<|im_middle|>", True)]


def _turn(role: str, name: str, body: list[Segment]) -> list[Segment]:
    return [*_head(role, name), *body, Segment("<|im_end|>", True)]


def _thoughts(text: str = "") -> list[Segment]:
    return [Segment("<think>", True), Segment(text), Segment("</think>", True)]


def _body(message: Message, keeps_thoughts: bool) -> Iterator[Segment]:
    if message["role"] == "assistant":
        yield from _thoughts(message.get("reasoning_content", "") if keeps_thoughts else "")
    elif message["role"] == "tool":
        yield Segment(f"## Return of {message['tool_call_id']}\n")
    yield Segment(message["content"])
    calls = message.get("tool_calls")
    if not calls:
        return
    yield Segment("<|tool_calls_section_begin|>", True)
    for call in calls:
        yield Segment("<|tool_call_begin|>", True)
        yield Segment(call["id"])
        yield Segment("<|tool_call_argument_begin|>", True)
        yield Segment(call["function"]["arguments"])
        yield Segment("<|tool_call_end|>", True)
    yield Segment("<|tool_calls_section_end|>", True)
