"""What a server is told when it starts, besides the engine's options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from k26jax.errors import RequestError


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    served_names: names of the model in requests and answers, the first one in answers.
    api_keys: any of them opens the routes that need one; none: all are open.
    max_waiting: sequences that may wait for a slot.
    max_sequences: sequences of one request, over its prompts and n.
    max_body_bytes: of one request.
    stream_steps: decoding steps between two looks of the host while an answer is streamed.
    stall_seconds: a call of the device that takes longer makes the server unhealthy.
    keepalive_seconds: a stream that is silent for so long gets a comment line.
    draft_trees: whether requests may ask for their draft trees.
    refuses_unknown: whether unknown fields are refused, or named in a header and ignored.
    shapes_answers: whether answers may be asked to follow a grammar.
    defaults: sampling parameters of requests that bring none.
    """

    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 256
    max_sequences: int = 16
    max_body_bytes: int = 32 << 20
    stream_steps: int = 1
    stall_seconds: float = 300.0
    keepalive_seconds: float = 5.0
    draft_trees: bool = False
    refuses_unknown: bool = True
    shapes_answers: bool = True
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise RequestError("served_names is empty; give the model a name")
        if not all(self.api_keys):
            raise RequestError("an API key is empty; give text")
        for name in (
            "max_waiting", "max_sequences", "max_body_bytes", "stream_steps", "stall_seconds",
            "keepalive_seconds",
        ):  # fmt: skip
            if not getattr(self, name) > 0:  # NaN is not
                raise RequestError(f"{name} = {getattr(self, name)}, expected more than 0")

    def shown(self) -> dict[str, Any]:
        """Returns the settings with the number of keys in place of the keys."""
        return dataclasses.asdict(self) | {"api_keys": len(self.api_keys)}
