"""Which fields of a request are honoured, ignored or refused: one table for code and docs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k26jax.errors import nearest
from k26jax.server.errors import invalid

CHAT, COMPLETION = "chat", "completion"


@dataclass(frozen=True)
class Refused:
    """A field that only some values may have.

    allowed: values that ask for nothing; null is always one.
    why: what the others would take.
    """

    allowed: tuple[Any, ...]
    why: str


_SHARED = {
    "model": "a served name; another one is 404",
    "max_tokens": "at least 1; without it the answer may fill the context",
    "temperature": "0 is greedy; default: of generation_config.json, else 1",
    "top_p": "above 0; default likewise",
    "top_k": "0 or -1: all; default likewise",
    "min_p": "default 0",
    "seed": "the same seed gives the same tokens, whatever else runs",
    "n": "up to --max-sequences; the i-th sequence uses seed + i",
    "stop": "a string or up to 16; found across tokens, left out of the text",
    "stop_token_ids": "ids that end the answer, besides the model's own",
    "min_tokens": "no end token and no stop string before that many tokens; default 0",
    "presence_penalty": "-2 to 2, taken from the logits of tokens in the output; default 0",
    "frequency_penalty": "-2 to 2, taken for each time a token is in the output; default 0",
    "repetition_penalty": "0.01 to 100, divides logits of tokens in prompt and output; default 1",
    "logit_bias": "by token id, -100 to 100, up to 300 tokens; added to the logits",
    "bad_words": "words that are not written in the tokenizer's spelling, up to 64 spellings",
    "ignore_eos": "go on past the model's own end tokens",
    "include_stop_str_in_output": "keep the stop string",
    "skip_special_tokens": "default true",
    "stream": "Server-sent events, one a decoding step and kind of text",
    "stream_options": "include_usage, continuous_usage_stats",
    "response_format": "text, json_object, or json_schema, which holds whether strict or not",
    "structured_outputs": "one of json, json_object, regex, choice, grammar; and after or at",
    "draft_trees": "a stream's trees, step by step; needs a server with --draft-trees",
}
_CHAT_ONLY = {
    "messages": "roles system, developer, user, assistant, tool; text parts alone",
    "max_completion_tokens": "the same as max_tokens; two different values are refused",
    "logprobs": "true: of each token that is shown, by the target alone, before temperature",
    "top_logprobs": "0 to 20 of the most likely tokens beside each; with logprobs alone",
    "tools": "functions; calls are read from the answer",
    "tool_choice": '"auto", "none", "required" (calls alone) or a named function (one call)',
    "parallel_tool_calls": "false: one call at most",
    "thinking": '{"type": "enabled" or "disabled", "keep": "all" or null}',
    "chat_template_kwargs": "thinking, preserve_thinking, and what the template reads",
    "reasoning_effort": '"none" switches thinking off, others on',
}
_COMPLETION_ONLY = {
    "prompt": "text, token ids, or a list of either",
    "echo": "begin the text with the prompt",
    "logprobs": "0 to 20: of each token that is shown and of as many likely ones; not with echo",
}
HONOURED = {CHAT: _SHARED | _CHAT_ONLY, COMPLETION: _SHARED | _COMPLETION_ONLY}
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
REFUSED = {
    CHAT: {
        "functions": Refused(([],), "send tools"),
        "function_call": Refused((), "send tool_choice"),
        "modalities": Refused((["text"],), "the server writes text alone"),
        "audio": Refused((), "the server writes text alone"),
        "prediction": Refused((), "drafts come from the drafter"),
        "verbosity": Refused(("medium",), "the model has no such switch"),
        "web_search_options": Refused((), "the server does not search"),
    },
    COMPLETION: {
        "best_of": Refused((1,), "sequences are not ranked; use n"),
        "suffix": Refused(("",), "the model does not fill in"),
    },
}


def known_fields(kind: str) -> list[str]:
    """Returns every field that is named in the table for a kind of request."""
    return [*HONOURED[kind], *IGNORED, *REFUSED[kind]]


def check_fields(kind: str, body: Mapping[str, Any], *, refuses_unknown: bool = True) -> list[str]:
    """Returns the unknown fields of a body; ignored ones are none.

    Raises: ApiError that names a field whose value asks for what is not there, or, if so told, an
        unknown one with the nearest known one.
    """
    unknown = []
    for name, value in body.items():
        refused = REFUSED[kind].get(name)
        if refused is not None:
            _refuse(name, value, refused)
        elif name not in HONOURED[kind] and name not in IGNORED:
            unknown.append(name[:80])
    if unknown and refuses_unknown:
        name = unknown[0]
        message = f"field {name!r} is unknown{nearest(name, known_fields(kind))}"
        raise invalid(message, "unsupported_parameter", param=name)
    return unknown


def _refuse(name: str, value: Any, refused: Refused) -> None:
    """Raises ApiError unless a value asks for nothing."""
    is_plain = value is None or any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in refused.allowed
    )
    if is_plain:
        return
    plain = f" or at {json.dumps(refused.allowed[0])}" if refused.allowed else ""
    raise invalid(
        f"{name} = {json.dumps(value):.80} is not supported: {refused.why}; leave it out{plain}",
        "unsupported_parameter",
        param=name,
    )


def fields_table() -> str:
    """Returns the table as Markdown, for docs/server.md."""
    lines = ["| field | where | what is done |", "|---|---|---|"]
    for name in dict.fromkeys([*HONOURED[CHAT], *HONOURED[COMPLETION]]):
        found = {
            kind: HONOURED[kind][name] for kind in (CHAT, COMPLETION) if name in HONOURED[kind]
        }
        is_alike = len(found) == 2 and len(set(found.values())) == 1
        for where, what in [("both", found[CHAT])] if is_alike else found.items():
            lines.append(f"| `{name}` | {where} | {what} |")
    lines += [f"| `{name}` | both | ignored |" for name in IGNORED]
    for name in dict.fromkeys([*REFUSED[CHAT], *REFUSED[COMPLETION]]):
        refused = REFUSED[CHAT].get(name) or REFUSED[COMPLETION][name]
        plain = f", but for null and `{json.dumps(refused.allowed[0])}`" if refused.allowed else ""
        lines.append(f"| `{name}` | {_where(name, REFUSED)} | refused{plain}: {refused.why} |")
    return "\n".join(lines)


def _where(name: str, table: Mapping[str, Mapping[str, Any]]) -> str:
    kinds = [kind for kind in (CHAT, COMPLETION) if name in table[kind]]
    return "both" if len(kinds) == 2 else kinds[0]
