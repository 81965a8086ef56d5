"""Whether a model shall think before it answers: the ways in which clients say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k26jax.errors import RequestError, nearest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_KNOWN = ("type", "keep")


@dataclass(frozen=True)
class Thinking:
    """What a request says about thinking; None: nothing.

    Fields:
        is_on: whether the model thinks first.
        is_preserved: whether thoughts of earlier turns stay in the prompt.
        options: what chat_template_kwargs says besides.
        effort: a reasoning_effort other than "none", for templates that read one.
    """

    is_on: bool | None
    is_preserved: bool | None
    options: dict[str, Any]
    effort: str | None = None


def read_thinking(
    thinking: Any = None, chat_template_kwargs: Any = None, reasoning_effort: Any = None
) -> Thinking:
    """Returns what the three fields of a chat request say together.

    `thinking` is {"type": "enabled" or "disabled", "keep": "all" or null}, as Moonshot has it;
    `chat_template_kwargs` {"thinking": bool, "preserve_thinking": bool, ...}, as other servers do;
    `reasoning_effort` "none" switches thinking off and any other effort on.

    Raises: RequestError for other values, and for fields that contradict each other.
    """
    said: dict[str, bool] = {}
    options: dict[str, Any] = {}
    preserved: set[bool] = set()
    if thinking is not None:
        said["thinking"], keeps = _moonshot(thinking)
        preserved |= keeps
    if chat_template_kwargs is not None:
        if not isinstance(chat_template_kwargs, Mapping):
            raise RequestError(f"chat_template_kwargs is {chat_template_kwargs!r:.80}, no object")
        options = dict(chat_template_kwargs)
        for name in ("thinking", "enable_thinking"):
            if (value := _switch(options.pop(name, None), name)) is not None:
                said[f"chat_template_kwargs.{name}"] = value
        value = _switch(options.pop("preserve_thinking", None), "preserve_thinking")
        preserved |= set() if value is None else {value}
    if reasoning_effort is not None:
        if reasoning_effort not in EFFORTS:
            raise RequestError(
                f"reasoning_effort is {reasoning_effort!r:.80}, expected one of "
                f"{', '.join(EFFORTS)}"
            )
        said["reasoning_effort"] = reasoning_effort != "none"
    if len(set(said.values())) > 1:
        shown = ", ".join(f"{name} {'on' if value else 'off'}" for name, value in said.items())
        raise RequestError(f"thinking is switched both on and off ({shown}); send one of them")
    if len(preserved) > 1:
        raise RequestError("thinking.keep and chat_template_kwargs.preserve_thinking differ")
    return Thinking(
        is_on=next(iter(said.values()), None),
        is_preserved=next(iter(preserved), None),
        options=options,
        effort=reasoning_effort if reasoning_effort != "none" else None,
    )


def _moonshot(value: Any) -> tuple[bool, set[bool]]:
    if not isinstance(value, Mapping) or value.get("type") not in ("enabled", "disabled"):
        raise RequestError(
            f'thinking is {value!r:.80}, expected {{"type": "enabled"}} or {{"type": "disabled"}}'
        )
    for name in value:
        if name not in _KNOWN:
            raise RequestError(f"thinking.{name} is unknown{nearest(str(name)[:80], _KNOWN)}")
    keep = value.get("keep")
    if keep not in (None, "all"):
        raise RequestError(f'thinking.keep is {keep!r:.80}, expected "all" or null')
    return value["type"] == "enabled", {True} if keep == "all" else set()


def _switch(value: Any, name: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"chat_template_kwargs.{name} is {value!r:.80}, expected true or false")
    return value
