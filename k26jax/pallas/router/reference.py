"""The router in plain JAX, float32 throughout (formulas 24a to 24f of the DeepSeek-V3 block)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32


def route(
    router_logits: Float32[Array, "t e"],
    selection_bias: Float32[Array, "e"] | None,
    *,
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
    """
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


def _keep_groups(choice: jax.Array, n_group: int, topk_group: int, *, two: bool) -> jax.Array:
    groups = choice.reshape(*choice.shape[:-1], n_group, -1)
    best = lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1) if two else groups.max(-1)
    kept = lax.top_k(best, topk_group)[1]
    is_kept = (kept[..., None] == jnp.arange(n_group)).any(axis=-2)
    return jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(choice.shape)
