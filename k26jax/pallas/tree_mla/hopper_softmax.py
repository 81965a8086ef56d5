"""The running softmax of tree_mla's kernel for Hopper: two warp groups that share their work.

Key blocks come in pairs. The first group weighs the first block of a pair, the second one the
second, and each gathers its half of the latents of both: scores are computed once, and one group
weighs while the other multiplies. Weights pass from one to the other through the shared memory that
held the block's rotary keys, which nobody needs once it has scores. The split of the work over two
groups is that of FlashMLA's kernel for Hopper ("A Deep-Dive Into the New Flash MLA Kernel", 2025).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from k26jax.pallas.gpu import architecture
from k26jax.pallas.tree_mla.programs import Job, Shape

# What it offers changes with every JAX, more than its types say.
plgpu: Any = mosaic_gpu

CONSUMERS = 2
# Parts of a stage that are loaded apart: a half of the latents for each group, and rotary keys.
PARTS = CONSUMERS + 1
_MASKED = -1e30
# Columns of a key block that are rewritten at once; more need more registers than there are.
_WRITTEN = 64

State = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class Memory:
    """A program's shared memory and barriers.

    q_latent: halves, as those of the latents.
    row_c_kv, row_k_pe: the tree row, where there is one.
    ring: key blocks, latents [stage, half, key, c] and rotary; later the result, in the same place.
    highest, total: what one group tells the other, [group, row].
    query_ready: a part of the queries is there; [part], as of a stage.
    row_ready: the tree row is there.
    ready: a part of a stage is filled; [stage * PARTS + part].
    free: a group has done with its half of the latents; [stage * CONSUMERS + group].
    scored: the first group's scores are under way; the second one's begin then, so that one weighs
      while the other multiplies.
    weighed: a group has left its weights and highest scores for the other.
    written: both groups have put the tree row into its block.
    done: both groups have read all of the ring.
    """

    q_latent: Any
    q_pe: Any
    row_c_kv: Any
    row_k_pe: Any
    ring: Any
    highest: Any
    total: Any
    query_ready: Any
    row_ready: Any
    ready: Any
    free: Any
    scored: Any
    weighed: Any
    written: Any
    done: Any


class _Weights(NamedTuple):
    """Weights of a block: highest scores up to it, sums of its weights, and themselves."""

    highest: jax.Array
    total: jax.Array
    narrow: jax.Array


@dataclass(frozen=True)
class _Group:
    """One of the two groups at work on a job; the index is static, for their programs differ."""

    memory: Memory
    job: Job
    shape: Shape
    index: int

    def walk(self) -> State:
        """Returns highest score, this group's part of the weight and its half of the latents."""
        rows, keys = self.shape.tile.rows, self.shape.tile.columns
        row_layout = plgpu.Layout.WGMMA.reduce(1)
        half = self.shape.latent // CONSUMERS
        state = (
            plgpu.layout_cast(jnp.full((rows,), _MASKED, jnp.float32), row_layout),
            plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), row_layout),
            plgpu.layout_cast(jnp.zeros((rows, half), jnp.float32), plgpu.Layout.WGMMA),
        )
        pair = (self._first, self._second)[self.index]
        return lax.fori_loop(0, pl.cdiv(self.job.n_blocks(keys), 2), pair, state)

    def _first(self, turn: jax.Array, state: State) -> State:
        block = 2 * turn
        is_pair = self._exists(block + 1)
        arrive = functools.partial(plgpu.barrier_arrive, self.memory.scored)
        scores = self._scores(block, 0, lambda: pl.when(is_pair)(arrive))
        own = self._weigh(block, scores, state[0])
        total, weighted = _shrunk(own.highest, state)
        weighted, _ = self._gather(weighted, block, 0, own.narrow)
        state = own.highest, total + own.total, weighted
        return lax.cond(
            is_pair,
            lambda state: self._absorb_other(block, 1, state)[0],
            lambda state: state,
            state,
        )

    def _second(self, turn: jax.Array, state: State) -> State:
        block = 2 * turn

        def pair(state: State) -> State:
            plgpu.barrier_wait(self.memory.scored)
            scores = self._scores(block, 1)
            # The first group waits for the weights: they are made while a product runs.
            state, own = self._absorb_other(
                block, 0, state, lambda highest: self._weigh(block + 1, scores, highest)
            )
            total, weighted = _shrunk(own.highest, state)
            weighted, _ = self._gather(weighted, block, 1, own.narrow)
            return own.highest, total + own.total, weighted

        return lax.cond(
            self._exists(block + 1),
            pair,
            lambda state: self._absorb_other(block, 0, state)[0],
            state,
        )

    def _absorb_other(
        self,
        block: jax.Array,
        stage: int,
        state: State,
        meanwhile: Callable[[jax.Array], Any] = lambda highest: None,
    ) -> tuple[State, Any]:
        """Returns the state with the other group's block of a pair, and `meanwhile`."""
        ready = self.memory.ready.at[stage * PARTS + self.index]
        # Of its block no more than the half that this group frees: the rest can be ahead.
        pl.when(self._is_whole(block + stage))(lambda: plgpu.barrier_wait(ready))
        plgpu.barrier_wait(self.memory.weighed.at[stage])
        highest = plgpu.load(
            self.memory.highest.at[stage], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
        )
        total, weighted = _shrunk(highest, state)
        weighted, found = self._gather(weighted, block, stage, meanwhile=lambda: meanwhile(highest))
        return (highest, total, weighted), found

    def _exists(self, block: jax.Array) -> jax.Array:
        return block < self.job.n_blocks(self.shape.tile.columns)

    def _is_whole(self, block: jax.Array) -> jax.Array:
        """Returns whether a block is there as it was loaded."""
        if self.shape.tokens > 1:
            return self._exists(block)
        return self._exists(block) & (block != self.job.n_cached(self.shape.tile.columns))

    def _place(self, block: jax.Array, stage: int) -> jax.Array:
        """Returns the stage in a form that the compiler cannot see through.

        Else it computes the addresses of all products before the loop, for which there are not
        enough registers.
        """
        return stage + lax.shift_right_logical(block, jnp.int32(30))

    def _scores(
        self, block: jax.Array, stage: int, then: Callable[[], None] = lambda: None
    ) -> jax.Array:
        """Returns a block's scores, unscaled.

        Args:
          block: the first one of the pair.
          then: what is done when all products are under way.
        """
        c_kv, k_pe = self.memory.ring[0]
        place, first = self._place(block, stage), self._place(block, 0)
        is_first, is_whole = block == 0, self._is_whole(block + stage)

        def await_part(part: int) -> None:
            # Products of one half run while the other is on its way.
            pl.when(is_first)(lambda: plgpu.barrier_wait(self.memory.query_ready.at[part]))
            ready = self.memory.ready.at[stage * PARTS + part]
            pl.when(is_whole)(lambda: plgpu.barrier_wait(ready))

        def score(scores: Any) -> jax.Array:
            for at in range(CONSUMERS):
                await_part(at)
                query = self.memory.q_latent.at[first + at]
                plgpu.wgmma(scores, query, c_kv.at[place, at].transpose((1, 0)))
            await_part(CONSUMERS)
            plgpu.wgmma(scores, self.memory.q_pe, k_pe.at[place].transpose((1, 0)))
            then()
            return scores[...]

        shape = self.shape.tile.rows, self.shape.tile.columns
        return pl.run_scoped(score, plgpu.ACC(shape, jnp.float32))

    def _weigh(self, block: jax.Array, scores: jax.Array, highest: jax.Array) -> _Weights:
        """Returns the weights of this group's block, of which it tells the other group."""
        keys = self.shape.tile.columns
        _, k_pe = self.memory.ring[0]
        place = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        seen = place <= self.job.last - (self.job.begin + block * keys)
        scores = jnp.where(seen, scores * (self.shape.scale * math.log2(math.e)), _MASKED)
        highest = jnp.maximum(highest, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(highest, scores.shape, [0]))
        narrow = weights.astype(jnp.bfloat16)
        k_pe.at[self.index][...] = narrow
        self.memory.highest.at[self.index][...] = highest
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory.weighed.at[self.index])
        return _Weights(highest, weights.sum(axis=1), narrow)

    def _gather(
        self,
        weighted: jax.Array,
        block: jax.Array,
        stage: int,
        weights: jax.Array | None = None,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> tuple[jax.Array, Any]:
        """Returns weighted + weights @ this group's half of a block's latents, and `meanwhile`.

        Args:
          weights: without, those that the other group has left.
          meanwhile: what is done while the product runs.
        """
        place = self._place(block, stage)
        c_kv, k_pe = self.memory.ring[0]
        left = k_pe.at[place] if weights is None else weights
        right = c_kv.at[place, self.index]

        def product(sums: Any) -> tuple[jax.Array, Any]:
            sums[...] = weighted
            plgpu.wgmma(sums, left, right)
            found = meanwhile()
            return sums[...], found

        if architecture() is None:
            # The interpreter knows no accumulator that starts with a value.
            left, right = left[...], right[...]
            # Unlike a product's, these reads are not done before others in the eyes of later loads.
            plgpu.commit_smem()
            found = meanwhile()
            weighted += jnp.dot(left, right, preferred_element_type=jnp.float32)
        else:
            weighted, found = pl.run_scoped(product, plgpu.ACC(weighted.shape, jnp.float32))
        plgpu.barrier_arrive(self.memory.free.at[stage * CONSUMERS + self.index])
        return weighted, found


def softmax(memory: Memory, job: Job, shape: Shape, group: jax.Array) -> State:
    """Returns highest score, total weight and a group's half of the weighted means of the latents.

    What both groups do alike stands once in the program: it runs but once or twice, and then
    fetching instructions takes its time.
    """
    if shape.tokens == 1:
        pl.when(job.is_tail)(lambda: _write_tree_row(memory, job, shape, group))
    walks = (_Group(memory, job, shape, index).walk for index in range(CONSUMERS))
    return _means(memory, group, lax.cond(group == 0, *walks))


def _write_tree_row(memory: Memory, job: Job, shape: Shape, group: jax.Array) -> None:
    """Puts the one tree row into its block: behind the cached rows, and zeros behind it.

    The block is one of a tail's only pair, since a piece is no longer than a pair.
    """
    keys, half = shape.tile.columns, shape.latent // CONSUMERS
    c_kv, k_pe = memory.ring[0]
    stage, place = job.n_cached(keys), lax.rem(job.length, keys)
    plgpu.barrier_wait(memory.row_ready)
    for part in range(PARTS):
        # As in the walk, which waits for no more of the other group's block than for this half.
        ready = memory.ready.at[stage * PARTS + part]
        is_waited = (stage == group) | (group == part)
        pl.when(is_waited)(functools.partial(plgpu.barrier_wait, ready))

    def write(block: Any, row: Any) -> None:
        held = plgpu.load(block, layout=plgpu.Layout.WGMMA)
        new = plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        at = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
        new = jnp.where(at == place, lax.broadcast_in_dim(new, held.shape, [1]), 0)
        block[...] = jnp.where(at < place, held, new)

    def write_part(part: jax.Array, _: None) -> None:
        columns = pl.ds(part * _WRITTEN, _WRITTEN)
        write(c_kv.at[stage, group, :, columns], memory.row_c_kv.at[group, columns])

    lax.fori_loop(0, half // _WRITTEN, write_part, None)
    pl.when(stage == group)(lambda: write(k_pe.at[stage], memory.row_k_pe))
    plgpu.commit_smem()
    plgpu.barrier_arrive(memory.written)
    plgpu.barrier_wait(memory.written)


def _means(memory: Memory, group: jax.Array, state: State) -> State:
    """Returns highest score, total weight and weighted means of the latents.

    Behind it both groups have done with the ring.
    """
    highest, total, weighted = state
    memory.total.at[group][...] = total
    plgpu.barrier_arrive(memory.done)
    plgpu.barrier_wait(memory.done)
    layout = plgpu.Layout.WGMMA.reduce(1)
    first, second = (
        plgpu.load(memory.total.at[at], layout=layout, optimized=False) for at in range(CONSUMERS)
    )
    total = first + second
    return highest, total, weighted * lax.broadcast_in_dim(1 / total, weighted.shape, [0])


def _shrunk(highest: jax.Array, state: State) -> tuple[jax.Array, jax.Array]:
    """Returns total and weighted latents for another highest score."""
    before, total, weighted = state
    shrink = jnp.exp2(before - highest)
    return total * shrink, weighted * lax.broadcast_in_dim(shrink, weighted.shape, [0])
