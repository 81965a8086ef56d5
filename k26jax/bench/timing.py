"""How long a kernel takes, without what it costs to start a program."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from k26jax.pallas.gpu import Tile, launch

_IN_A_ROW = 20


def seconds_a_call(
    call: Callable[..., Any],
    x: jax.Array,
    operands: Sequence[Any] = (),
    *,
    lengths: tuple[int, int] = (8, 40),
    repeats: int = 9,
    options: Mapping[str, Any] | None = None,
) -> float:
    """Returns the seconds of one call among many that wait for each other.

    A program of many calls runs several times in a row, so that the card is timed and not the
    host. Two programs of different length are timed; their difference has no dispatch in it. Calls
    are chained by a kernel that takes x and a result and gives x; what that costs alone is
    subtracted.

    Args:
      call: (number of the call, x, *operands) -> arrays; the number picks weights or routings, so
        that the cache of the card holds none of them.
      options: of XLA, for the programs of calls.
    """
    whole = _slope(call, x, operands, lengths, repeats, options)
    return whole - _seconds_a_link(x.shape, x.dtype, lengths, repeats)


@functools.cache
def _seconds_a_link(shape: tuple[int, ...], dtype: Any, lengths: Any, repeats: int) -> float:
    x = jnp.zeros(shape, dtype)
    return _slope(lambda number, x: jnp.zeros(1), x, (), lengths, repeats)


def _slope(
    call: Callable[..., Any],
    x: jax.Array,
    operands: Sequence[Any],
    lengths: tuple[int, int],
    repeats: int,
    options: Mapping[str, Any] | None = None,
) -> float:
    def chain(n_calls: int) -> Any:
        def program(x: jax.Array, *operands: Any) -> jax.Array:
            for number in range(n_calls):
                x = touched(x, jax.tree.leaves(call(number, x, *operands)))
            return x

        return jax.jit(program, compiler_options=dict(options or {})).lower(x, *operands)

    # Most of a measurement is compiling, which one thread of the host does at a time.
    with ThreadPoolExecutor(len(lengths)) as pool:
        programs = list(pool.map(lambda lowered: lowered.compile(), map(chain, lengths)))
    short, long = (_median(program, x, operands, repeats) for program in programs)
    return (long - short) / (lengths[1] - lengths[0])


def touched(x: jax.Array, results: Sequence[jax.Array]) -> jax.Array:
    """Returns x in its own memory, which XLA takes to depend on the results; not on empty ones."""
    results = [result for result in results if result.size]

    def kernel(x_ref: Any, *refs: Any) -> None:
        *result_refs, out_ref = refs
        # Interpreted, XLA looks inside: times zero is no constant, for the result could be NaN.
        parts = (_first(ref).astype(jnp.float32) * 0 for ref in result_refs)
        out_ref[_zeros(x)] = _first(x_ref) + sum(parts, jnp.float32(0)).astype(x.dtype)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    tile = Tile(warps=1, stages=1)
    return launch(
        kernel, x, *results, name="touch", grid=(1,), out_shape=shape, tile=tile, aliases={0: 0}
    )


def _zeros(array: Any) -> tuple[jax.Array, ...]:
    return (jnp.int32(0),) * len(array.shape)


def _first(ref: Any) -> jax.Array:
    return ref[_zeros(ref)]


def _median(
    program: Callable[..., Any], x: jax.Array, operands: Sequence[Any], repeats: int
) -> float:
    times = []
    for turn in range(repeats + 2):
        begun = time.perf_counter()
        # The first two turns warm up.
        jax.block_until_ready([program(x, *operands) for _ in range(_IN_A_ROW)])
        if turn >= 2:
            times.append((time.perf_counter() - begun) / _IN_A_ROW)
    return sorted(times)[len(times) // 2]


def operations_a_second(width: int = 8192) -> float:
    """Returns the rate of XLA's bfloat16 products of square matrices, measured here."""
    weights = jnp.ones((width, width), jnp.bfloat16)
    x = jnp.ones((width, width), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    seconds = seconds_a_call(lambda _, x, w: product(x, w), x, (weights,), lengths=(1, 4))
    return 2 * width**3 / seconds


def read_bytes_a_second(n_bytes: int = 1 << 31) -> float:
    """Returns the rate at which a plain kernel reads memory, measured here."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    width, turns = 4096, 16
    rows = max(n_bytes // 4 // width // turns, 1)

    def kernel(x_ref: Any, held_ref: Any, out_ref: Any) -> None:
        row = pl.program_id(0)

        def add(turn: jax.Array, total: jax.Array) -> jax.Array:
            return total + plt.load(held_ref.at[row * turns + turn, pl.ds(0, width)])

        total = jax.lax.fori_loop(0, turns, add, jnp.zeros(width, jnp.int32))
        out_ref[row] = jnp.sum(total)

    def read(number: int, x: jax.Array, held: jax.Array) -> jax.Array:
        return launch(
            kernel,
            x,
            held,
            name="read",
            grid=(rows,),
            out_shape=jax.ShapeDtypeStruct((rows,), jnp.int32),
            tile=Tile(warps=8, stages=3),
        )

    held = jnp.ones((rows * turns, width), jnp.int32)
    return held.nbytes / seconds_a_call(read, jnp.zeros(1), (held,), lengths=(2, 10))
