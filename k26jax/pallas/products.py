"""The one way to multiply: operands in their own type, sums in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from k26jax.pallas.gpu import platform


def contract(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the einsum of two arrays of one dtype, accumulated in float32, in float32.

    Float32 operands are multiplied in full precision; a GPU would otherwise round them to TF32.
    """
    if x.dtype == jnp.bfloat16 and platform() == "cpu":
        # The same sums: products of bfloat16 are exact in float32. XLA's CPU lacks some of them.
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32, precision=precision)


def total(parts: jax.Array) -> jax.Array:
    """Returns the sum over the first axis in float32, in order."""
    return functools.reduce(jnp.add, parts.astype(jnp.float32))
