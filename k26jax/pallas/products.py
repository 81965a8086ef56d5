"""The one way to multiply: operands in their own type, sums in float32."""

import jax
import jax.numpy as jnp
from jax import lax


def contract(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the einsum of two arrays of one dtype, accumulated in float32, in float32.

    Float32 operands are multiplied in full precision; a GPU would otherwise round them to TF32.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32, precision=precision)
