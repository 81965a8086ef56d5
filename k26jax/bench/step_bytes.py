"""The bytes that one rank must read or write once in each stage of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k26jax.bench.dummy import leaves_of
from k26jax.bench.launches import STAGES
from k26jax.engine.loading import Loaded

_EXPERTS = ("gate_proj", "up_proj", "down_proj", "experts")
# Of the drafter's parameters, those that committing tokens reads; keys and values are read twice.
_OF_CONTEXT = ("fc", "hidden_norm")
_OF_BOTH = ("k_proj", "v_proj", "k_norm")
_F32 = 4


@dataclass(frozen=True)
class HeldBytes:
    """What a rank holds, by what reads it.

    embedding, head: of the target's vocabulary; one array twice where they are tied.
    expert: one routed expert of one layer.
    target: the rest of the target.
    block: what a draft pass reads.   context: what committing tokens reads.
    """

    embedding: int
    head: int
    expert: float
    target: int
    block: int
    context: int

    @classmethod
    def of(cls, loaded: Loaded) -> HeldBytes:
        """Returns the bytes of an engine's arrays on one device."""
        target = {path: leaf.nbytes for path, leaf in leaves_of(loaded.params["target"])}
        drafter = dict(leaves_of(loaded.params.get("drafter", {})))
        config = loaded.models.target.config
        experts = {path: size for path, size in target.items() if _is_expert(path)}
        stacks = [leaf for path, leaf in leaves_of(loaded.params["target"]) if path in experts]
        n_experts = stacks[0].shape[1] if stacks else 1
        embedding = target.pop("embed_tokens")
        head = embedding if config.tie_word_embeddings else target.pop("lm_head")
        moe_layers = max(len(config.moe_layer_ids), 1)
        context = {path: leaf.nbytes for path, leaf in drafter.items() if _is_of_context(path)}
        block = {path: leaf.nbytes for path, leaf in drafter.items() if path not in _OF_CONTEXT}
        return cls(
            embedding=embedding,
            head=head,
            expert=sum(experts.values()) / moe_layers / n_experts,
            target=sum(target.values()) - sum(experts.values()),
            block=sum(block.values()),
            context=sum(context.values()),
        )


def stage_bytes(loaded: Loaded, context: int, touched: float) -> dict[str, int]:
    """Returns the bytes of every stage of one step of one sequence; no stage is left out.

    Weights once, of the experts the touched ones; caches up to `context`; logits and tables.
    What passes from kernel to kernel is not counted.

    Args:
      touched: distinct experts of a layer.
    """
    held, plan, models = HeldBytes.of(loaded), loaded.plan, loaded.models
    config, width, each = models.target.config, plan.width, loaded.dtype.itemsize
    row = config.hidden_size * each
    vocabulary = held.head // row
    found: dict[str, int] = dict.fromkeys(STAGES, 0)
    token = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * each
    experts = touched * len(config.moe_layer_ids) * held.expert
    found["verify"] = int(held.target + experts + held.head + width * row + context * token)
    found["accept"] = width * vocabulary * _F32
    found["compact"] = token
    if models.drafter is not None and plan.drafts:
        draft = models.drafter.config
        heads = _draft_heads(loaded)
        seen = sum(min(window or context, context) for window in draft.windows)
        found["draft"] = held.block + held.head + seen * 2 * heads * draft.head_dim * each
        found["draft"] += plan.depth * vocabulary * _F32
        found["tree_build"] = plan.depth * plan.budget * (_F32 + _F32)
        taps = len(draft.target_layer_ids) * row
        found["compact"] = held.context + (plan.depth + 1) * (token + taps)
    return found


def _draft_heads(loaded: Loaded) -> int:
    """Returns the drafter's key-value heads on this rank."""
    keys: Any = loaded.params["drafter"]["k_proj"]
    return keys.shape[1] // loaded.models.drafter.config.head_dim  # pyright: ignore


def _is_expert(path: str) -> bool:
    return path.startswith("moe.") and path.split(".")[1] in _EXPERTS


def _is_of_context(path: str) -> bool:
    return path in (*_OF_CONTEXT, *_OF_BOTH)
