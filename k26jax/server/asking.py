"""From a body of a request to its reply that is not sent yet: one road with HTTP and without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from k26jax.server.answering import Planned, plan_chat, plan_completion
from k26jax.server.fields import CHAT, COMPLETION
from k26jax.server.protocol import read_asked
from k26jax.server.reply import Reply
from k26jax.server.service import Service
from k26jax.server.trees import check_trees

_KINDS: dict[str, tuple[str, Callable[..., Planned]]] = {
    CHAT: ("chat.completion", plan_chat),
    COMPLETION: ("text_completion", plan_completion),
}


async def ask(
    service: Service, kind: str, data: dict[str, Any], *, request_id: str, planner: Executor
) -> Reply:
    """Returns the reply to a body of a kind; nothing waits for a slot yet.

    Args:
        planner: makes the prompts; long ones take their time.

    Raises: ApiError or K26Error for what cannot be answered.
    """
    name, plan = _KINDS[kind]
    settings = service.settings
    body, unknown = read_asked(kind, data, refuses_unknown=settings.refuses_unknown)
    check_trees(body, settings)
    model, llm = service.check_model(body.model), service.llm
    loop = asyncio.get_running_loop()
    planned = await loop.run_in_executor(planner, plan, llm, body, settings)
    return Reply(
        service,
        body,
        model,
        name,
        planned.requests,
        planned.choices,
        planned.prompts,
        request_id,
        unknown,
    )
