"""Tools, messages and scripted answers that the tests of chat share."""

from __future__ import annotations

from k26jax.text.answer import ChatAnswer
from k26jax.text.chat import ChatPrompt
from k26jax.text.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments
from k26jax.text.tokenizer import Tokenizer
from k26jax.text.tools import check_tools

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
END = "<|im_end|>"


def tool(name: str, properties: dict | None = None, **schema) -> dict:
    """Returns a tool as a request declares it."""
    parameters = {"type": "object", "properties": properties or {}} | schema
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SEARCH = tool("search", {"query": {"type": "string"}}, required=["query"])
READ_FILE = tool("read_file", {"path": {"type": "string"}}, required=["path"])
WEATHER = tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}})
TOOLS = [SEARCH, READ_FILE, WEATHER]


def call(id: str, arguments: str) -> str:
    """Returns a call as the model writes it."""
    return f"{CALL}{id}{ARGUMENTS}{arguments}{CALL_END}"


def calls(*written: str) -> str:
    """Returns a section of calls."""
    return SECTION + "".join(written) + SECTION_END


def answer(
    tokenizer: Tokenizer,
    tools: list | None = None,
    *,
    thinking: bool = False,
    made: int = 0,
    **options,
) -> ChatAnswer:
    """Returns a reader of an answer to a prompt of three tokens; the turn's end stops it."""
    prompt = ChatPrompt([1, 2, 3], "", thinking, check_tools(tools), made)
    options = {"max_tokens": 100_000, "stop_ids": tokenizer.eos_ids} | options
    return ChatAnswer(tokenizer, prompt, **options)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of an answer in which control tokens are written out."""
    return tokenizer.encode(text, allow_special=True)


def read(tokenizer: Tokenizer, text: str, tools: list | None = None, **options) -> ChatAnswer:
    """Returns the reader after a whole answer in one run."""
    reader = answer(tokenizer, tools, **options)
    reader.push(ids_of(tokenizer, text))
    return reader


def positions(events: list[Event]) -> dict[str, list[int]]:
    """Returns the token positions of every kind of delta."""
    found: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, ReasoningDelta | ContentDelta | ToolCallArguments):
            found.setdefault(type(event).__name__, []).extend(event.tokens)
    return found
