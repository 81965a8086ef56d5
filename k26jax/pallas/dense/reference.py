"""Products with float weights in plain JAX: the meaning of the kernels.

Sums run in float32 and are rounded once, where the model rounds: behind each product.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from k26jax.pallas.norm.reference import rotate_heads
from k26jax.pallas.products import contract


def dense(
    x: Float[Array, "t k"],
    weights: tuple[Float[Array, "l _ k"], ...],
    *,
    layer: int | Int32[Array, ""],
    dtypes: tuple[DTypeLike | None, ...] | None = None,
) -> tuple[Float[Array, "t _"], ...]:
    """Returns x times each weight transposed.

    Args:
      weights: stacks over layers, which share x; used in x's dtype.
      layer: index into the stacks.
      dtypes: of each result; None: x's.
    """
    kinds = dtypes or (None,) * len(weights)
    return tuple(
        contract("tk,nk->tn", x, weight[layer].astype(x.dtype)).astype(kind or x.dtype)
        for weight, kind in zip(weights, kinds, strict=True)
    )


def partial_sums(
    x: Float[Array, "t k"],
    weights: tuple[Float[Array, "l _ k"], ...],
    *,
    layer: int | Int32[Array, ""],
) -> tuple[Float32[Array, "part t _"], ...]:
    """Returns x times each weight transposed, in parts that the reader adds in order.

    Args: as in `dense`.
    """
    return tuple(
        contract("tk,nk->tn", x, weight[layer].astype(x.dtype))[None] for weight in weights
    )


def gated(
    x: Float[Array, "t k"],
    gate: Float[Array, "l f k"],
    up: Float[Array, "l f k"],
    *,
    layer: int | Int32[Array, ""],
    others: tuple[Float[Array, "l _ k"], ...] = (),
    dtypes: tuple[DTypeLike | None, ...] | None = None,
) -> tuple[Float[Array, "t _"], ...]:
    """Returns silu(x gate) * (x up), [t, f], and then x times each of `others`.

    Both products are rounded to x's dtype; SwiGLU runs in float32 and is rounded once.

    Args:
      others: more weights that share x, as in `dense`.
      dtypes: of each other result; None: x's.
    """
    gates, ups = (part.astype(jnp.float32) for part in dense(x, (gate, up), layer=layer))
    inner = (jax.nn.silu(gates) * ups).astype(x.dtype)
    return (inner, *dense(x, others, layer=layer, dtypes=dtypes))


def absorb(
    query: Float[Array, "t h qk"],
    kv_b: Float[Array, "l h nv c"],
    cos: Float32[Array, "t r_half"],
    sin: Float32[Array, "t r_half"],
    *,
    layer: int | Int32[Array, ""],
    nope: int,
    interleaved: bool,
) -> tuple[Float[Array, "t h c"], Float[Array, "t h r"]]:
    """Returns q_latent, each head's first `nope` components times its w_uk, and q_pe, rotated.

    Formula 13 of absorbed MLA (DeepSeek-V2, section 2.1).

    Args:
      kv_b: w_uk in the first `nope` rows of each head, w_uv in the others.
      interleaved: as in `norm.reference.rotate`.
    """
    w_uk = kv_b[layer, :, :nope].astype(query.dtype)
    q_latent = contract("thn,hnc->thc", query[..., :nope], w_uk).astype(query.dtype)
    return q_latent, rotate_heads(query, cos, sin, interleaved=interleaved)


def values(
    attended: Float[Array, "t h c"],
    kv_b: Float[Array, "l h nv c"],
    *,
    layer: int | Int32[Array, ""],
    nope: int,
) -> Float[Array, "t h v"]:
    """Returns each head's values from its attended latent, in kv_b's dtype.

    Args:
      attended: rounded to kv_b's dtype before the product.
      kv_b: as in `absorb`.
    """
    w_uv = kv_b[layer, :, nope:]
    return contract("thc,hvc->thv", attended.astype(kv_b.dtype), w_uv).astype(kv_b.dtype)
