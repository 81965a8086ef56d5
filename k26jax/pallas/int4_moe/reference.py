"""Routed experts in plain JAX: the meaning (`dense`), and forms for few rows and for many."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.products import contract, total
from k26jax.pallas.router.reference import block_list

GROUP_SIZE = 32
GROUPED_ROWS = 64
FEW_ROWS = 64
EXPERTS_AT_ONCE = 16


class ExpertWeights(NamedTuple):
    """One projection of every expert of every layer.

    values: [l, e, o, i] in a float type, or INT4 words int32 [l, e, o, ceil(i / 8)].
    scales: bfloat16 [l, e, o, i / 32] for INT4 words, else None.
    """

    values: jax.Array
    scales: jax.Array | None = None

    def decode(
        self, layer: int, ids: Int32[Array, "n"] | None, width: int, dtype: DTypeLike
    ) -> Float[Array, "n o {width}"]:
        """Returns the matrices of the given experts, INT4 products rounded once.

        Args:
          ids: None: all experts.
        """
        at = layer if ids is None else (layer, ids)
        values = self.values[at]
        if self.scales is None:
            return values.astype(dtype)
        return decode_int4(values, self.scales[at], width, dtype)


class Shared(NamedTuple):
    """The shared expert from behind its first products on.

    gate, up: its first products, [part, t, f], to be added in order.
    down: its down projections, [l, d, f].
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array


def decode_int4(
    packed: Int32[Array, "*rows words"],
    scales: Float[Array, "*rows groups"],
    width: int,
    dtype: DTypeLike,
) -> Float[Array, "*rows {width}"]:
    """Returns (nibble - 8) * scale in `dtype`, rounded once.

    Word w of a row holds columns 8w to 8w + 7, lowest nibble first, as offset binary.
    """
    nibbles = (packed[..., None] >> (4 * jnp.arange(8, dtype=jnp.int32))) & 15
    values = nibbles.reshape(*packed.shape[:-1], -1)[..., :width] - 8
    grouped = values.reshape(*values.shape[:-1], -1, GROUP_SIZE).astype(jnp.float32)
    product = grouped * scales.astype(jnp.float32)[..., None]
    return product.reshape(values.shape).astype(dtype)


def experts(
    x: Float[Array, "t d"],
    topk_ids: Int32[Array, "t k"],
    topk_weights: Float32[Array, "t k"],
    gate: ExpertWeights,
    up: ExpertWeights,
    down: ExpertWeights,
    *,
    layer: int,
) -> Float32[Array, "t d"]:
    """Returns sum over k of topk_weights * expert(x).

    A token's weight is multiplied in before the down product. An expert's matrices are decoded
    once for all the rows of a block that share it.

    Args:
      topk_ids: an id outside the experts takes no part.
    """
    form = by_expert if x.shape[0] <= FEW_ROWS else grouped
    return form(x, topk_ids, topk_weights, gate, up, down, layer=layer)


def add_shared(
    routed: Float32[Array, "t d"],
    shared: Shared,
    *,
    layer: int,
    kind: DTypeLike,
    is_whole: bool = True,
) -> Float32[Array, "t d"]:
    """Returns the routed experts' sum plus the shared expert's output.

    Its products are rounded to `kind`, and so is what SwiGLU gives; the sum is not.

    Args:
      is_whole: False: this is one rank's part of the output, and stays in float32.
    """
    gate, up = (total(part).astype(kind).astype(jnp.float32) for part in shared[:2])
    inner = (jax.nn.silu(gate) * up).astype(kind)
    out = contract("tf,df->td", inner, shared.down[layer].astype(kind))
    return routed + (out.astype(kind).astype(jnp.float32) if is_whole else out)


def dense(
    x: Float[Array, "t d"],
    topk_ids: Int32[Array, "t k"],
    topk_weights: Float32[Array, "t k"],
    gate: ExpertWeights,
    up: ExpertWeights,
    down: ExpertWeights,
    *,
    layer: int,
) -> Float32[Array, "t d"]:
    """Returns the same as `experts`, by running every expert on every row; differentiable."""
    share = _shares(topk_ids, topk_weights, gate.values.shape[1])
    return _run(x, None, share, gate, up, down, layer)


def by_expert(
    x: Float[Array, "t d"],
    topk_ids: Int32[Array, "t k"],
    topk_weights: Float32[Array, "t k"],
    gate: ExpertWeights,
    up: ExpertWeights,
    down: ExpertWeights,
    *,
    layer: int,
) -> Float32[Array, "t d"]:
    """Returns the same as `experts`, by running every chosen expert, some at once, on every row.

    For few rows: one large product over several experts is faster on a CPU than one for each. As
    many experts as are run at once anyway are all run, without looking which were chosen.
    """
    n_experts = gate.values.shape[1]
    if n_experts <= min(EXPERTS_AT_ONCE, topk_ids.size):
        return dense(x, topk_ids, topk_weights, gate, up, down, layer=layer)
    share = _shares(topk_ids, topk_weights, n_experts)
    chosen = (topk_ids[..., None] == jnp.arange(n_experts)).any(axis=(0, 1))
    most = min(n_experts, topk_ids.size)
    at_once = min(EXPERTS_AT_ONCE, most)
    # Chosen experts first; the rest of the last turn has no share in any row.
    order = jnp.argsort(~chosen, stable=True)
    order = jnp.pad(order, (0, -n_experts % at_once), constant_values=n_experts)

    def turn(number: jax.Array | int, out: jax.Array) -> jax.Array:
        ids = lax.dynamic_slice_in_dim(order, number * at_once, at_once)
        known = jnp.minimum(ids, n_experts - 1)
        part = jnp.where(ids < n_experts, share[:, known], 0.0)
        return out + _run(x, known, part, gate, up, down, layer)

    out = jnp.zeros(x.shape, jnp.float32)
    if at_once == most:
        return turn(0, out)
    return lax.fori_loop(0, -(-chosen.sum(dtype=jnp.int32) // at_once), turn, out)


def grouped(
    x: Float[Array, "t d"],
    topk_ids: Int32[Array, "t k"],
    topk_weights: Float32[Array, "t k"],
    gate: ExpertWeights,
    up: ExpertWeights,
    down: ExpertWeights,
    *,
    layer: int,
) -> Float32[Array, "t d"]:
    """Returns the same as `experts`, by sorting (token, expert) pairs into blocks of one expert.

    For many rows: each expert runs on the rows that chose it and no others.
    """
    n_experts, n_pairs = gate.values.shape[1], topk_ids.size
    plan = block_list(topk_ids, n_experts, GROUPED_ROWS)
    top_k = topk_ids.shape[1]
    pair_weights = jnp.append(topk_weights.reshape(-1), 0.0)

    def run_block(block: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.arange(GROUPED_ROWS)
        pair = jnp.where(row < plan.count[block], plan.order[plan.first[block] + row], n_pairs)
        picked = x[jnp.minimum(pair // top_k, x.shape[0] - 1)]
        share = pair_weights[pair][:, None]
        result = _run(picked, plan.expert[block][None], share, gate, up, down, layer)
        return out.at[pair].set(result, mode="drop")

    out = jnp.zeros((n_pairs, x.shape[1]), jnp.float32)
    out = lax.fori_loop(0, plan.n_blocks[0], run_block, out)
    return out.reshape(*topk_ids.shape, -1).sum(axis=1)


def _run(
    x: jax.Array,
    ids: jax.Array | None,
    share: jax.Array,
    gate: ExpertWeights,
    up: ExpertWeights,
    down: ExpertWeights,
    layer: int,
) -> jax.Array:
    """Returns sum over experts ids [n] of share [t, n] * expert(x [t, d]), float32 [t, d]."""
    rows, width = x.shape
    inner, n = gate.values.shape[2], share.shape[1]

    def columns(weights: ExpertWeights) -> jax.Array:
        return weights.decode(layer, ids, width, x.dtype).reshape(n * inner, width)

    # One product over all experts' columns and one over all their rows, the shares folded in
    # between: a few large products keep a CPU busier than many small ones.
    hidden = jax.nn.silu(contract("ti,oi->to", x, columns(gate)))
    hidden = hidden * contract("ti,oi->to", x, columns(up))
    hidden = (hidden.reshape(rows, n, inner) * share[..., None]).astype(x.dtype)
    back = down.decode(layer, ids, inner, x.dtype).transpose(0, 2, 1).reshape(n * inner, width)
    return contract("to,oi->ti", hidden.reshape(rows, n * inner), back)


def _shares(topk_ids: jax.Array, topk_weights: jax.Array, n_experts: int) -> jax.Array:
    """Returns the weight of every expert in every row, float32 [t, e]."""
    is_chosen = topk_ids[..., None] == jnp.arange(n_experts)
    return jnp.where(is_chosen, topk_weights[..., None], 0.0).sum(axis=1)
