"""The flags of `generate` that make a prompt a message of a chat, and how its answer is shown."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from k26jax.commands.terminal import say
from k26jax.errors import RequestError

if TYPE_CHECKING:
    from k26jax.engine.loading import Prepared
    from k26jax.text.chat import ChatPrompt
    from k26jax.text.events import Event


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message; thoughts go to standard error",
    )
    group.add_argument("--system", metavar="TEXT", help="begin the chat with a system message")
    group.add_argument(
        "--instant", action="store_true", help="answer without thinking first, if the model can"
    )


def check_chat_options(args: argparse.Namespace) -> None:
    """Raises RequestError for flags that mean something in a chat alone, or nothing in one."""
    for flag, given in (("--system", args.system is not None), ("--instant", args.instant)):
        if given and not args.chat:
            raise RequestError(f"{flag} is of a chat; give --chat too")


def chat_prompt(args: argparse.Namespace, prepared: Prepared, prompt: str) -> ChatPrompt | None:
    """Returns the prompt of the chat that the flags ask for, or None.

    Raises: RequestError or TokenizerError if the model cannot chat like that.
    """
    from k26jax.text.chat import chat_format

    if not args.chat:
        return None
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = [*system, {"role": "user", "content": prompt}]
    thinking = False if args.instant else None
    return chat_format(prepared.config.model_path, prepared.tokenizer).prompt(
        messages, thinking=thinking
    )


def show_events(events: list[Event]) -> None:
    """Prints content to standard output and thoughts to standard error, each in its place."""
    from k26jax.text.events import ContentDelta, ReasoningDelta

    for event in events:
        if isinstance(event, ReasoningDelta):
            say(event.text, end="")
        elif isinstance(event, ContentDelta):
            print(event.text, end="", flush=True)
