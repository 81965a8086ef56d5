"""Messages to a prompt, by the folder's own template or by Kimi's built-in format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k26jax.errors import RequestError, TokenizerError
from k26jax.text.kimi_chat import NEEDED, render_kimi
from k26jax.text.markers import THINK_OPEN, TOOL_MARKERS
from k26jax.text.messages import check_messages, count_calls
from k26jax.text.segments import Segment, encode_segments, join_segments
from k26jax.text.template import THINKING_SWITCHES, ChatTemplate, find_template
from k26jax.text.tokenizer import Tokenizer
from k26jax.text.tools import Tool, check_tools


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation, and what reading its answer takes.

    Fields:
        token_ids: the prompt.
        text: the same for showing, control tokens by name.
        is_thinking: the answer begins inside of its thoughts.
        tools: those whose calls may be in the answer.
        calls: tool calls that the conversation holds; the next one's number.
    """

    token_ids: list[int]
    text: str
    is_thinking: bool
    tools: list[Tool]
    calls: int


class ChatFormat:
    """How one checkpoint folder writes a conversation.

    Args:
        folder: with `chat_template.jinja`, or a template in its tokenizer_config.json, or neither;
            then the tokenizer must have Kimi's control tokens.

    Raises: TokenizerError for a template that cannot be read.
    """

    def __init__(self, folder: str | Path, tokenizer: Tokenizer):
        self._folder, self._tokenizer = Path(folder), tokenizer
        self._plain = find_template(self._folder)
        self._with_tools = find_template(self._folder, with_tools=True)
        names = {"bos_token": tokenizer.bos_name, "eos_token": tokenizer.eos_name}
        self._tokens = {field: name for field, name in names.items() if name is not None}

    @property
    def calls_tools(self) -> bool:
        """Whether calls of tools can be told from the rest of an answer."""
        return all(name in self._tokenizer.special_ids for name in TOOL_MARKERS)

    def prompt(
        self,
        messages: Any,
        tools: Any = None,
        *,
        thinking: bool | None = None,
        preserve_thinking: bool | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> ChatPrompt:
        """Returns the prompt of a conversation.

        Args:
            messages: as `check_messages` takes them.
            tools: as `check_tools` takes them.
            thinking: think before the answer; None: as the template does by itself.
            preserve_thinking: keep thoughts of earlier turns; None: likewise.
            options: further variables of the folder's template.
            add_generation_prompt: end with the head of the answer.

        Raises: RequestError for bad messages or tools, and for what this model's format has not;
            TokenizerError if it has no format at all.
        """
        checked, declared = check_messages(messages), check_tools(tools)
        if declared and not self.calls_tools:
            raise RequestError(
                f"tools are given, but the tokenizer of {self._folder.name} has no "
                f"{TOOL_MARKERS[0]}, so calls could not be told from text; send none"
            )
        template = self._with_tools if declared else self._plain
        switches = {"thinking": thinking, "preserve_thinking": preserve_thinking}
        given = {name: value for name, value in switches.items() if value is not None}
        if template is None:
            segments = self._built_in(checked, declared, given, options, add_generation_prompt)
        else:
            segments = template.render(
                checked,
                declared,
                self._switched(template, given, options or {}),
                special_ids=self._tokenizer.special_ids,
                tokens=self._tokens,
                add_generation_prompt=add_generation_prompt,
            )
        joined = list(join_segments(segments))
        return ChatPrompt(
            token_ids=encode_segments(joined, self._tokenizer),
            text="".join(segment.text for segment in joined),
            is_thinking=add_generation_prompt and _ends_thinking(joined),
            tools=declared,
            calls=count_calls(checked),
        )

    def _built_in(
        self,
        messages: list[dict[str, Any]],
        tools: list[Tool],
        switches: dict[str, bool],
        options: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> list[Segment]:
        missing = [name for name in NEEDED if name not in self._tokenizer.special_ids]
        if missing:
            raise TokenizerError(
                f"{self._folder} has no chat template, and its tokenizer has no {missing[0]}, "
                "which Kimi's format needs; put the model's chat_template.jinja there"
            )
        if options:
            raise RequestError(
                f"chat_template_kwargs has {next(iter(options))!r:.80}, but this model's built-in "
                "chat format reads only thinking and preserve_thinking"
            )
        return render_kimi(messages, tools, add_generation_prompt=add_generation_prompt, **switches)

    def _switched(
        self, template: ChatTemplate, switches: dict[str, bool], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the template's variables, the switch of thinking under the name that it reads.

        Models whose thinking has no switch think anyway.

        Raises: RequestError if the template does not read what the request sets.
        """
        given = dict(options)
        for name, value in switches.items():
            known = THINKING_SWITCHES if name == "thinking" else (name,)
            read = [spelling for spelling in known if spelling in template.variables]
            thinks_anyway = (
                name == "thinking" and value and THINK_OPEN in self._tokenizer.special_ids
            )
            if read or not thinks_anyway:
                given |= {spelling: value for spelling in read or (name,)}
        template.check_options(given)
        return given


def chat_format(folder: str | Path, tokenizer: Tokenizer | None) -> ChatFormat:
    """Returns the chat format of a model's folder.

    Raises: TokenizerError without a tokenizer, or for a template that cannot be read.
    """
    if tokenizer is None:
        raise TokenizerError(
            f"{folder} holds no tiktoken.model or tokenizer.json, so it cannot chat; put the "
            "model's tokenizer files there"
        )
    return ChatFormat(folder, tokenizer)


def _ends_thinking(segments: Sequence[Segment]) -> bool:
    """Whether the prompt leaves thoughts open: after the last tag there is only white space."""
    for segment in reversed(segments):
        if segment.is_control:
            return segment.text == THINK_OPEN
        if segment.text.strip():
            return False
    return False
