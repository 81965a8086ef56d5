"""Costs of prefixes: sums of -log-probs as the words of IEEE doubles, which order as integers.

JAX has float64 only behind a process-wide switch, and a compiler may flush or reorder float32
terms. Integer words give float64's sums bit for bit, in plain JAX and inside a kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

INFINITE = 0x7FF00000  # high word of a double that is infinite


class Cost(NamedTuple):
    """Doubles that are not negative; they order as the unsigned integers of their words."""

    high: jax.Array  # uint32: exponent, 20 bits of the significand; INFINITE: no candidate
    low: jax.Array  # uint32


def cost_of(log_probs: jax.Array) -> Cost:
    """Returns -log_probs (float32), exactly; 0 for positive values, infinite for no number."""
    bits = lax.bitcast_convert_type(log_probs, jnp.uint32)
    infinite = bits & 0x7FFFFFFF >= 0x7F800000
    magnitude = jnp.where(bits >> 31 == 1, bits & 0x7FFFFFFF, 0)
    subnormal = magnitude < 0x00800000
    # The leading one of a subnormal moves to bit 23, where the exponent field counts it.
    zeros = lax.clz(lax.bitcast_convert_type(magnitude, jnp.int32)).astype(jnp.uint32)
    shift = jnp.where(subnormal, jnp.minimum(zeros, 31) - 8, 0)
    fraction = magnitude << shift & 0x7FFFFF
    exponent = jnp.where(subnormal, 897 - shift, (magnitude >> 23) + 896)
    high = jnp.where(magnitude == 0, 0, exponent << 20 | fraction >> 3)
    return where(infinite, nothing(log_probs), Cost(high, fraction << 29))


def nothing(like: jax.Array) -> Cost:
    """Returns infinite costs in the shape of an array."""
    return Cost(jnp.full_like(like, INFINITE, jnp.uint32), jnp.zeros_like(like, jnp.uint32))


def where(condition: jax.Array, a: Cost, b: Cost) -> Cost:
    """Returns a where the condition holds, else b."""
    return Cost(jnp.where(condition, a.high, b.high), jnp.where(condition, a.low, b.low))


def add(a: Cost, b: Cost) -> Cost:
    """Returns a + b in IEEE double arithmetic, rounded to nearest even."""
    swap = (a.high < b.high) | ((a.high == b.high) & (a.low < b.low))
    big, small = where(swap, b, a), where(swap, a, b)
    exponent, small_exponent = big.high >> 20, small.high >> 20
    high, low = _significand(big)
    small_high, small_low = _significand(small)
    # Align: shift right by whole words, then by bits; what falls off sticks in the last bit.
    distance = jnp.minimum(exponent - small_exponent, 63)
    whole, shift = distance >= 32, distance & 31
    lost = jnp.where(whole, small_low, 0)
    small_low = jnp.where(whole, small_high, small_low)
    small_high = jnp.where(whole, 0, small_high)
    lost = lost | small_low & ((jnp.uint32(1) << shift) - 1)
    small_low = (
        small_low >> shift | small_high << (31 - shift) << 1 | (lost != 0).astype(jnp.uint32)
    )
    small_high = small_high >> shift
    low = low + small_low
    high = high + small_high + (low < small_low).astype(jnp.uint32)
    carry = high >> 24
    low = jnp.where(carry == 1, low >> 1 | high << 31 | low & 1, low)
    high = high >> carry
    # Three guard bits: round up above the half, and at the half if that makes the result even.
    up = ((low & 7) + (low >> 3 & 1) > 4).astype(jnp.uint32)
    rounded = (low >> 3 | high << 29) + up
    high = (high >> 3) + (rounded < up).astype(jnp.uint32)
    # The leading one of the significand adds one to the exponent field.
    high = high + ((exponent + carry - (exponent > 0).astype(jnp.uint32)) << 20)
    return where(big.high >= INFINITE, nothing(high), Cost(high, rounded))


def _significand(cost: Cost) -> tuple[jax.Array, jax.Array]:
    """Returns the 53 bits of the significand, leading one included, and three zero guard bits."""
    leading = (cost.high >= 1 << 20).astype(jnp.uint32) << 20
    high = cost.high & 0xFFFFF | leading
    return high << 3 | cost.low >> 29, cost.low << 3
