"""A folder's own chat template, rendered in jinja2's sandbox."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, sandbox

from k26jax.errors import RequestError, TokenizerError, nearest
from k26jax.text.declare import declare_tools
from k26jax.text.masking import Mask
from k26jax.text.messages import Message
from k26jax.text.segments import Segment, split_controls
from k26jax.text.tools import Tool
from k26jax.text.vocabulary import read_json

TEMPLATE_FILE = "chat_template.jinja"
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
# Both spellings are in use: Kimi's, and that of most other families.
THINKING_SWITCHES = ("thinking", "enable_thinking")
_READS_STRINGS = re.compile(r"arguments(?:'\]|\"\])?\s+is\s+(?:not\s+)?string")
_ASKS_FOR_NONE = re.compile(r"content(?:'\]|\"\])?\s+is\s+(?:not\s+)?none")


class _Generation(ext.Extension):
    """`{% generation %}`, with which templates mark what a model is trained on: shows its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.If(nodes.Const(True), body, [], [], lineno=line)


class ChatTemplate:
    """A compiled template.

    Fields:
        variables: the names that it reads and neither sets nor gets here.
        reads_tools: whether declared tools are part of the prompt.
    """

    def __init__(self, source: str, where: str):
        self._source, self._where = source, where
        # Some tell a message of calls by its missing content, others write None where it misses.
        self._no_content = None if _ASKS_FOR_NONE.search(source) else ""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"{where} is no valid template: line {error.lineno}: {error.message}; copy it "
                "again from the model's repository"
            ) from error
        names = meta.find_undeclared_variables(parsed)
        self.reads_tools = not names.isdisjoint(("tools", "tools_ts_str"))
        self.variables = frozenset(names) - _GIVEN - set(environment.globals) - _own(parsed)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises RequestError for a variable that the template does not read, or one of ours."""
        for name in options:
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise RequestError(
                    f"{self._where} does not read {name!r:.80}"
                    f"{nearest(str(name)[:80], self.variables)}; it reads: {known}"
                )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        *,
        special_ids: Mapping[str, int],
        tokens: Mapping[str, str],
        add_generation_prompt: bool,
    ) -> list[Segment]:
        """Returns the prompt; control tokens come from the template alone, never from messages.

        Args:
            options: further variables, as `check_options` lets them pass.
            tokens: bos_token, eos_token and the like, by the names that templates use.

        Raises: RequestError if the template refuses the messages, cannot render them, or knows no
            tools.
        """
        if tools and not self.reads_tools:
            raise RequestError(f"{self._where} does not declare tools to the model; send none")
        mask = Mask(special_ids, [messages, tools, options, self._source, tokens])
        given = {name: mask.hide(value) for name, value in options.items()}
        if tools and "tools_ts_str" in self.variables:
            given["tools_ts_str"] = mask.hide(declare_tools(tools))
        given |= tokens
        given["tools"] = mask.hide(tools) if tools else None
        given["add_generation_prompt"] = add_generation_prompt
        text = self._first_rendering(messages, mask, given)
        return [
            segment if segment.is_control else Segment(mask.restore(segment.text))
            for segment in split_controls(text, special_ids)
        ]

    def _first_rendering(
        self, messages: Sequence[Message], mask: Mask, given: dict[str, Any]
    ) -> str:
        """Returns the text with arguments of calls as objects, or as JSON where only that works."""
        has_calls = any(message.get("tool_calls") for message in messages)
        forms = [False] if has_calls and not _READS_STRINGS.search(self._source) else []
        for keeps_strings in (*forms, True):
            shown = [self._hidden(mask, message, keeps_strings) for message in messages]
            try:
                return self._template.render(messages=shown, **given)
            except (TypeError, jinja2.UndefinedError) as error:
                if not keeps_strings:
                    continue
                self._refuse(mask, error)
            except jinja2.TemplateError as error:
                self._refuse(mask, error)
            except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
                self._refuse(mask, error)
            except (RecursionError, OverflowError, MemoryError) as error:
                self._refuse(mask, error)
        raise AssertionError("the last form returns or raises")

    def _hidden(self, mask: Mask, message: Message, keeps_strings: bool) -> Message:
        """Returns a message as templates expect it, with its texts hidden and its role as it is."""
        shown = dict(message)
        role = shown.pop("role")
        calls = shown.pop("tool_calls", None)
        shown = {"role": role} | mask.hide(shown)
        if calls:
            shown["content"] = shown["content"] or self._no_content
            shown["tool_calls"] = [
                mask.hide(call if keeps_strings else _with_object(call)) for call in calls
            ]
        return shown

    def _refuse(self, mask: Mask, error: BaseException) -> NoReturn:
        message = mask.restore(str(error))[:400]
        raise RequestError(f"{self._where} cannot render these messages: {message}") from error


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _own(parsed: nodes.Template) -> set[str]:
    """Returns the names that a template sets itself, without asking whether it was given them."""
    own = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    asked = {
        test.node.name
        for test in parsed.find_all(nodes.Test)
        if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
    }
    return own - asked


def find_template(folder: Path, *, with_tools: bool = False) -> ChatTemplate | None:
    """Returns the template of a folder, or None if it has none.

    `chat_template.jinja` comes before the field of tokenizer_config.json, which may hold several
    by name: "tool_use" is for requests with tools, "default" for the others.

    Raises: TokenizerError for a file that cannot be read or parsed.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), TEMPLATE_FILE)
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{folder}: {TEMPLATE_FILE} cannot be read: {error}") from error
    config = folder / "tokenizer_config.json"
    found = read_json(config).get("chat_template") if config.is_file() else None
    where = "chat_template in tokenizer_config.json"
    if isinstance(found, list):
        named = {
            item["name"]: item["template"]
            for item in found
            if isinstance(item, dict) and {"name", "template"} <= item.keys()
        }
        found = (named.get("tool_use") if with_tools else None) or named.get("default")
        if found is None:
            raise TokenizerError(f'{folder}: {where} has no template called "default"')
    if found is None:
        return None
    if not isinstance(found, str):
        raise TokenizerError(f"{folder}: {where} is a {type(found).__name__}, expected text")
    return ChatTemplate(found, where)


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no escapes for HTML, none beyond ASCII."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
