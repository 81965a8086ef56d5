"""The router in plain JAX, float32 throughout (formulas 24a to 24f of the DeepSeek-V3 block)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from k26jax.pallas.products import total


class Blocks(NamedTuple):
    """Work list of a product grouped by expert: block i is one expert on a few pairs.

    A pair is token * k + choice. At most min(pairs, experts) + pairs // rows blocks are needed.
    """

    order: Int32[Array, "padded"]
    """All pairs by expert, then by number; those of no expert last; then `rows` times `pairs`."""
    expert: Int32[Array, "blocks"]
    """0 in the blocks from n_blocks on."""
    first: Int32[Array, "blocks"]
    """Where in `order` the block starts; 0 from n_blocks on."""
    count: Int32[Array, "blocks"]
    """Pairs of the block: 1 to `rows`; 0 from n_blocks on."""
    n_blocks: Int32[Array, "1"]
    """Blocks in use, by ascending expert."""


def route(
    router_logits: Float32[Array, "*part t e"],
    selection_bias: Float32[Array, "*l e"] | None,
    *,
    layer: int | Int32[Array, ""] = 0,
    num_experts_per_tok: int,
    scoring_func: str,
    topk_method: str,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Int32[Array, "t {num_experts_per_tok}"], Float32[Array, "t {num_experts_per_tok}"]]:
    """Returns topk_ids, best first, ties to the lowest id, and topk_weights.

    The bias decides the choice only; the weights are the plain scores of the chosen experts.

    Args:
      router_logits: whole, or in parts to be added in order.
      selection_bias: of this layer, or the stack of all layers.
      layer: index into the stack.
    """
    if router_logits.ndim == 3:
        router_logits = total(router_logits)
    if selection_bias is not None and selection_bias.ndim == 2:
        selection_bias = selection_bias[layer]
    scores = (
        jax.nn.sigmoid(router_logits)
        if scoring_func == "sigmoid"
        else jax.nn.softmax(router_logits, axis=-1)
    )
    choice = scores if selection_bias is None else scores + selection_bias
    if n_group > 1 and topk_method != "greedy":
        choice = _keep_groups(choice, n_group, topk_group, two=selection_bias is not None)
    topk_ids = lax.top_k(choice, num_experts_per_tok)[1]
    topk_weights = jnp.take_along_axis(scores, topk_ids, axis=-1)
    if norm_topk_prob:
        topk_weights /= topk_weights.sum(axis=-1, keepdims=True) + 1e-20
    return topk_ids, topk_weights * routed_scaling_factor


def block_list(topk_ids: Int32[Array, "t k"], n_experts: int, rows: int) -> Blocks:
    """Returns the pairs of every expert, cut into blocks of at most `rows`.

    Args:
      topk_ids: an id outside the experts takes no part.
    """
    n_pairs = topk_ids.size
    expert_of_pair = topk_ids.reshape(-1)
    known = (expert_of_pair >= 0) & (expert_of_pair < n_experts)
    expert_of_pair = jnp.where(known, expert_of_pair, n_experts)
    order = jnp.argsort(expert_of_pair, stable=True).astype(jnp.int32)
    size = jnp.zeros(n_experts, jnp.int32).at[expert_of_pair].add(1, mode="drop")
    start = jnp.cumsum(size) - size
    blocks = -(-size // rows)
    block_end = jnp.cumsum(blocks)
    block = jnp.arange(most_blocks(n_pairs, n_experts, rows), dtype=jnp.int32)
    expert = jnp.searchsorted(block_end, block, side="right").astype(jnp.int32)
    live = expert < n_experts
    expert = jnp.where(live, expert, 0)
    done = (block - (block_end - blocks)[expert]) * rows
    return Blocks(
        order=jnp.pad(order, (0, rows), constant_values=n_pairs),
        expert=expert,
        first=jnp.where(live, start[expert] + done, 0),
        count=jnp.where(live, jnp.minimum(size[expert] - done, rows), 0),
        n_blocks=block_end[-1:],
    )


def route_and_list(
    router_logits: Float32[Array, "*part t e"],
    selection_bias: Float32[Array, "*l e"] | None,
    valid: Bool[Array, "t"],
    *,
    rows: int,
    layer: int | Int32[Array, ""] = 0,
    first: int | Int32[Array, ""] = 0,
    held: int | None = None,
    num_experts_per_tok: int,
    scoring_func: str,
    topk_method: str,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[
    Int32[Array, "t {num_experts_per_tok}"], Float32[Array, "t {num_experts_per_tok}"], Blocks
]:
    """Returns topk_ids, topk_weights and the blocks of the valid rows.

    Ids count from the first of the experts that are here; those of experts elsewhere and of rows
    that are not valid are the number of experts here.

    Args: as in `route`, and
      rows: of a block.
      first, held: which experts are here; default: all.
    """
    held = router_logits.shape[-1] if held is None else held
    topk_ids, topk_weights = route(
        router_logits,
        selection_bias,
        layer=layer,
        num_experts_per_tok=num_experts_per_tok,
        scoring_func=scoring_func,
        topk_method=topk_method,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
    )
    local = topk_ids - first
    is_here = valid[:, None] & (local >= 0) & (local < held)
    local = jnp.where(is_here, local, held)
    return local, topk_weights, block_list(local, held, rows)


def most_blocks(n_pairs: int, n_experts: int, rows: int) -> int:
    """Returns the largest number of blocks that pairs of `n_experts` experts can need."""
    return min(n_pairs, n_experts) + n_pairs // rows


def _keep_groups(choice: jax.Array, n_group: int, topk_group: int, *, two: bool) -> jax.Array:
    groups = choice.reshape(*choice.shape[:-1], n_group, -1)
    best = lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1) if two else groups.max(-1)
    kept = lax.top_k(best, topk_group)[1]
    is_kept = (kept[..., None] == jnp.arange(n_group)).any(axis=-2)
    return jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(choice.shape)
