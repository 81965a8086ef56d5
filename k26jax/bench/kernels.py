"""`k26jax bench kernels`: what each kernel reaches at the sizes of a rank of Kimi K2.6."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k26jax.bench.heap_tree import heap_seconds
from k26jax.bench.timing import seconds_a_call
from k26jax.pallas import dense, int4_moe, router, tree_build, tree_mla, vocab_topk
from k26jax.pallas.bits import pack_bits
from k26jax.pallas.dense.cases import CASES as DENSE
from k26jax.pallas.int4_moe.cases import CASES as MOE
from k26jax.pallas.router.cases import CASES as ROUTER
from k26jax.pallas.tree_build.cases import CASES as TREES
from k26jax.pallas.tree_mla.cases import CASES as MLA
from k26jax.pallas.vocab_topk.cases import CASES as TOP

PALLAS = {"kernels": "pallas"}
# Who computes: our kernels, or XLA with the plain form of the same operation.
BY = {"k26jax": "pallas", "XLA": "reference"}
ROUTINGS = 12
COPIES_BYTES = 300_000_000  # more than a card's cache holds
ROWS = (1, 16, 64)


class Rates(NamedTuple):
    """What the card does at best, measured in the same run."""

    read_bytes_a_second: float
    operations_a_second: float


@dataclass(frozen=True)
class Row:
    """One measured case.

    by: who computed it: k26jax, or a peer.
    n_bytes: that must be read or written once; operations: multiplications and additions.
    """

    kernel: str
    case: str
    seconds: float
    n_bytes: int
    operations: int
    by: str = "k26jax"

    def floor_seconds(self, rates: Rates) -> float:
        """Returns the time in which the bytes alone, or the operations alone, could be done."""
        return max(
            self.n_bytes / rates.read_bytes_a_second, self.operations / rates.operations_a_second
        )


def measure(kernels: list[str] | None = None, *, small: bool = False) -> Iterator[Row]:
    """Yields the large cases of each kernel as they are measured; `small`: the small ones."""
    for name in kernels or FAMILIES:
        yield from FAMILIES[name](small)


def _random(key: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    draw = jax.jit(lambda: jax.random.uniform(jax.random.key(key), shape, jnp.float32, -0.5, 0.5))
    return draw().astype(dtype)


def _copies(n_bytes: int) -> int:
    return max(2, min(24, -(-COPIES_BYTES // n_bytes)))


def _moe(small: bool) -> Iterator[Row]:
    for case in MOE:
        if case.is_small == small:
            yield _time_moe(case)


def _time_moe(case: Any) -> Row:
    rng = np.random.default_rng(0)
    chosen = [
        np.stack([rng.choice(case.n_experts, case.top_k, False) for _ in range(case.tokens)])
        for _ in range(ROUTINGS)
    ]
    if case.top_k == 1:
        chosen = [np.arange(case.tokens)[:, None] % case.n_experts] * ROUTINGS
    ids = [jnp.asarray(one, jnp.int32) for one in chosen]
    blocks = [router.block_list(one, case.n_experts, int4_moe.BLOCK_ROWS, **PALLAS) for one in ids]
    experts = int4_moe.TiledExperts(
        _tiles(case.n_experts, 2 * case.inner, case.hidden),
        _tiles(case.n_experts, case.hidden, case.inner),
    )
    weights = jnp.full((case.tokens, case.top_k), 1 / case.top_k, jnp.float32)

    def call(number: int, x: jax.Array, ids: Any, blocks: Any, experts: Any) -> jax.Array:
        at = number % ROUTINGS
        return int4_moe.tiled_experts(
            x, ids[at], weights, blocks[at], experts, layer=0, inner=case.inner
        )

    x = _random(1, (case.tokens, case.hidden))
    seconds = seconds_a_call(call, x, (ids, blocks, experts))
    touched = sum(len(np.unique(one)) for one in chosen) / ROUTINGS
    each = 3 * case.hidden * case.inner
    # Half a byte a weight and two bytes for 32 of them.
    n_bytes = int(touched * each * (0.5 + 2 / 32))
    operations = 2 * each * case.tokens * case.top_k
    return Row("int4_moe", f"{case.name}, {touched:.0f} experts", seconds, n_bytes, operations)


def _tiles(n_experts: int, outputs: int, inputs: int) -> int4_moe.Tiles:
    columns = int4_moe.expert_columns()
    grid = (1, n_experts, -(-outputs // columns), -(-inputs // 128))
    words = jax.random.bits(jax.random.key(2), (*grid, columns, 32), jnp.uint16)
    # Two scales of 2^-7 each.
    scales = jnp.full((*grid, 2, columns), 0x3C003C00, jnp.int32)
    return int4_moe.Tiles(words.astype(jnp.int16), scales)


def _dense(small: bool) -> Iterator[Row]:
    for case in DENSE:
        if case.is_small != small:
            continue
        widths = (case.widths[0], *case.widths) if case.is_gated else case.widths
        n_bytes = 2 * case.k * sum(widths)
        copies = _copies(n_bytes)
        weights = tuple(_random(i, (copies, width, case.k)) for i, width in enumerate(widths))

        def call(number, x, weights, case=case, copies=copies, kernels="pallas") -> Any:
            options = {"layer": number % copies, "kernels": kernels}
            if case.is_gated:
                gate, up, *others = weights
                return dense.gated(x, gate, up, others=tuple(others), **options)
            if case.is_parts:
                return dense.partial_sums(x, weights, **options)
            return dense.dense(x, weights, **options)

        for rows, (by, kernels) in itertools.product(ROWS, BY.items()):
            named = functools.partial(call, kernels=kernels)
            seconds = seconds_a_call(named, _random(9, (rows, case.k)), (weights,))
            yield Row("dense", f"{case.name} T={rows}", seconds, n_bytes, rows * n_bytes, by)


def _mla(small: bool) -> Iterator[Row]:
    for case in MLA:
        if case.is_small == small:
            yield _time_mla(case)


def _time_mla(case: Any) -> Row:
    batch, rows = len(case.lengths), case.rows
    n_bytes = 2 * sum(case.lengths) * (case.latent + case.rope)
    layers = _copies(max(n_bytes, 1))
    widths = (case.latent, case.rope)
    query, q_pe = (_random(i, (batch, rows, case.heads, w)) for i, w in enumerate(widths))
    cache = tuple(_random(2 + i, (layers, batch, case.capacity, w)) for i, w in enumerate(widths))
    tree = tuple(_random(4 + i, (batch, rows, w)) for i, w in enumerate(widths))
    seen = jnp.broadcast_to(jnp.tri(rows, dtype=bool), (batch, rows, rows))
    options = {
        "slots": jnp.arange(batch),
        "lengths": jnp.asarray(case.lengths, jnp.int32),
        "ancestors": pack_bits(seen),
    }

    def call(number: int, query: Any, q_pe: Any, cache: Any, tree: Any, options: Any) -> Any:
        return tree_mla.tree_mla(
            query, q_pe, *cache, *tree, layer=number % layers, scale=0.07, **options, **PALLAS
        )

    seconds = seconds_a_call(call, query, (q_pe, cache, tree, options))
    operations = 2 * rows * case.heads * sum(case.lengths) * (2 * case.latent + case.rope)
    return Row("tree_mla", case.name, seconds, n_bytes, operations)


def _router(small: bool) -> Iterator[Row]:
    for case in ROUTER:
        if case.is_small != small:
            continue
        bias = _random(1, (case.n_experts,), jnp.float32) if case.has_bias else None
        valid = jnp.ones(case.n_tokens, bool)

        def call(number, logits, bias, valid, case=case, kernels="pallas") -> Any:
            options = {"rows": int4_moe.BLOCK_ROWS, "kernels": kernels, **case.rule}
            return router.route_and_list(logits, bias, valid, **options)

        logits = _random(2, (case.n_tokens, case.n_experts), jnp.float32)
        for by, kernels in BY.items():
            named = functools.partial(call, kernels=kernels)
            seconds = seconds_a_call(named, logits, (bias, valid))
            yield Row("router", case.name, seconds, logits.nbytes, 0, by)


def _top(small: bool) -> Iterator[Row]:
    for case in TOP:
        if case.is_small != small:
            continue

        def call(number: int, logits: jax.Array, case=case) -> Any:
            if case.count == 1:
                return vocab_topk.best_token(logits, **PALLAS)[1]
            return vocab_topk.top_tokens(logits, case.count, **PALLAS).log_probs

        logits = _random(3, (case.rows, case.width), jnp.float32)
        yield Row("vocab_topk", case.name, seconds_a_call(call, logits), logits.nbytes, 0)


def _trees(small: bool) -> Iterator[Row]:
    for case in TREES:
        if case.is_small != small or not case.budget:
            continue
        shape = (case.slots, case.depths, case.width)
        table = jnp.sort(_random(4, shape, jnp.float32) - 1.0, axis=-1, descending=True)
        ids = jnp.broadcast_to(jnp.arange(case.width, dtype=jnp.int32), shape)
        root = jnp.zeros(case.slots, jnp.int32)

        def call(number: int, table: jax.Array, ids: Any, root: Any, case=case) -> Any:
            return tree_build.build(table, ids, root, case.budget, **PALLAS).token_ids

        seconds = seconds_a_call(call, table, (ids, root))
        n_bytes = table.nbytes + ids.nbytes
        yield Row("tree_build", case.name, seconds, n_bytes, 0)
        seconds = heap_seconds(np.asarray(table), case.budget)
        yield Row("tree_build", case.name, seconds, n_bytes, 0, "Python heap")


FAMILIES: dict[str, Callable[[bool], Iterator[Row]]] = {
    "int4_moe": _moe,
    "tree_mla": _mla,
    "dense": _dense,
    "router": _router,
    "vocab_topk": _top,
    "tree_build": _trees,
}
