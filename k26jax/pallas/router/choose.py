"""The choice of experts inside a kernel, for a tile of tokens.

Numbers are compared as integers that order alike, and the largest and the lowest index are found
apart: a GPU reduces an integer over a warp in one instruction. No result depends on how the tile
lies in registers, so a token's bits are the same in any tile.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k26jax.pallas.inside import LOWEST, first_best, from_key, to_key


class Rule(NamedTuple):
    """How experts are chosen: the arguments of `reference.route`."""

    n_experts: int
    num_experts_per_tok: int
    scoring_func: str
    topk_method: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def lanes(self) -> int:
        """Experts, padded."""
        return pl.next_power_of_2(self.n_experts)

    @property
    def choices(self) -> int:
        """Chosen experts of a token, padded."""
        return pl.next_power_of_2(self.num_experts_per_tok)


def choose(
    logits_ref: Any,
    bias_ref: Any,
    layer: jax.Array,
    first: jax.Array | int,
    tokens: int,
    rule: Rule,
) -> tuple[jax.Array, jax.Array]:
    """Returns topk_ids and topk_weights [tokens, rule.choices] of the tokens from `first` on.

    Args:
      logits_ref: [part, t, e], the parts to be added in order.
      bias_ref: [l, e]; None: no selection bias.
      tokens: a power of two; those beyond the array get arbitrary experts.
    """
    lane = jnp.arange(rule.lanes)[None, :]
    row = first + jnp.arange(tokens)[:, None]
    is_expert = lane < rule.n_experts
    rows, lanes = pl.ds(first, tokens), pl.ds(0, rule.lanes)
    inside = is_expert & (row < logits_ref.shape[1])
    logits = (
        plt.load(logits_ref.at[jnp.int32(part), rows, lanes], mask=inside, other=0.0)
        for part in range(logits_ref.shape[0])
    )
    scores = _scores(functools.reduce(jnp.add, logits), is_expert, rule)
    selected = scores
    if bias_ref is not None:
        bias = plt.load(bias_ref.at[layer, lanes], mask=is_expert.reshape(rule.lanes), other=0.0)
        selected = scores + bias[None, :]
    keys = jnp.where(is_expert, to_key(selected), LOWEST)
    if rule.n_group > 1 and rule.topk_method != "greedy":
        keys = _keep_groups(keys, lane, rule, two=bias_ref is not None)

    column = jnp.arange(rule.choices)[None, :]
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    ids = jnp.zeros((tokens, rule.choices), jnp.int32)
    weights = jnp.zeros((tokens, rule.choices), jnp.float32)
    total = jnp.zeros((tokens, 1), jnp.float32)
    for turn in range(rule.num_experts_per_tok):
        _, best = first_best(keys, lane)
        # Scores are not negative, so their bits order as they do; all others count as zero.
        score = jnp.max(jnp.where(lane == best, bits, 0), axis=1)[:, None]
        score = lax.bitcast_convert_type(score, jnp.float32)
        keys = jnp.where(lane == best, LOWEST, keys)
        ids = jnp.where(column == turn, best, ids)
        weights = jnp.where(column == turn, score, weights)
        total = total + score
    if rule.norm_topk_prob:
        weights = weights / (total + 1e-20)
    return ids, weights * rule.routed_scaling_factor


def store_rows(
    refs: Sequence[Any], values: Sequence[jax.Array], first: jax.Array | int, rule: Rule
) -> None:
    """Stores tiles [tokens, rule.choices] as the rows from `first` on."""
    for ref, value in zip(refs, values, strict=True):
        tokens, choices = value.shape
        row = first + jnp.arange(tokens)[:, None]
        column = jnp.arange(choices)[None, :]
        inside = (row < ref.shape[0]) & (column < rule.num_experts_per_tok)
        plt.store(ref.at[pl.ds(first, tokens), pl.ds(0, choices)], value, mask=inside)


def _scores(logits: jax.Array, is_expert: jax.Array, rule: Rule) -> jax.Array:
    if rule.scoring_func == "sigmoid":
        return jax.nn.sigmoid(logits)
    highest = jnp.max(jnp.where(is_expert, logits, -jnp.inf), axis=1)[:, None]
    scores = jnp.where(is_expert, jnp.exp(logits - highest), 0.0)
    total = scores
    # A sum of two is the same in any order.
    while total.shape[1] > 1:
        total = jnp.sum(total.reshape(total.shape[0], 2, -1), axis=1)
    return scores / total


def _keep_groups(keys: jax.Array, lane: jax.Array, rule: Rule, *, two: bool) -> jax.Array:
    """Returns the keys, those outside the best groups as of minus infinity."""
    size = rule.n_experts // rule.n_group
    group = jnp.arange(pl.next_power_of_2(rule.n_group))[None, :]
    group_keys = jnp.full((keys.shape[0], group.shape[1]), LOWEST, jnp.int32)
    for number in range(rule.n_group):
        members = jnp.where(lane // size == number, keys, LOWEST)
        score, best = first_best(members, lane)
        if two and size > 1:
            second = jnp.max(jnp.where(lane == best, LOWEST, members), axis=1)[:, None]
            score = to_key(from_key(score) + from_key(second))
        group_keys = jnp.where(group == number, score, group_keys)
    kept = jnp.zeros(keys.shape, jnp.int32)
    for _ in range(rule.topk_group):
        _, best = first_best(group_keys, group)
        group_keys = jnp.where(group == best, LOWEST, group_keys)
        kept = jnp.where(lane // size == best, 1, kept)
    lowest = to_key(jnp.full(keys.shape, -jnp.inf, jnp.float32))
    return jnp.where(kept == 1, keys, jnp.where(lane < rule.n_experts, lowest, LOWEST))
