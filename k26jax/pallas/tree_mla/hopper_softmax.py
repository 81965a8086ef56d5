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
    scored: the first group has its scores; the second one's begin then, so that one weighs while
      the other multiplies.
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
        self._write_tree_row(block)
        scores = self._scores(block, 0)
        plgpu.barrier_arrive(self.memory.scored)
        highest, total, weighted = state
        own = self._weigh(block, scores, highest)
        total, weighted = _shrunk(own.highest, state)
        weighted, _ = self._gather(weighted, block, 0, own.narrow)
        pl.when(self._is_whole(block + 1))(lambda: self._await(1))
        highest = self._others_highest()
        total, weighted = _shrunk(highest, (own.highest, total + own.total, weighted))
        weighted, _ = self._gather(weighted, block + 1, 1)
        return highest, total, weighted

    def _second(self, turn: jax.Array, state: State) -> State:
        block = 2 * turn
        self._write_tree_row(block)
        plgpu.barrier_wait(self.memory.scored)
        scores = self._scores(block, 1)
        pl.when(self._is_whole(block))(lambda: self._await(0))
        highest = self._others_highest()
        total, weighted = _shrunk(highest, state)
        # The first group waits for the weights.
        weighted, own = self._gather(
            weighted, block, 0, meanwhile=lambda: self._weigh(block + 1, scores, highest)
        )
        total, weighted = _shrunk(own.highest, (highest, total, weighted))
        weighted, _ = self._gather(weighted, block + 1, 1, own.narrow)
        return own.highest, total + own.total, weighted

    def _exists(self, block: jax.Array) -> jax.Array:
        return block < self.job.n_blocks(self.shape.tile.columns)

    def _is_mixed(self, block: jax.Array) -> jax.Array:
        """Returns whether the one tree row is to be written into a block, which is the last."""
        return self._exists(block) & (block == self.job.n_cached(self.shape.tile.columns))

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

    def _await(self, stage: int) -> None:
        # Of the other's block nothing but the half that this group frees: the rest can be ahead.
        for part in range(PARTS) if stage == self.index else (self.index,):
            plgpu.barrier_wait(self.memory.ready.at[stage * PARTS + part])

    def _scores(self, block: jax.Array, stage: int) -> jax.Array:
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
            return scores[...]

        shape = self.shape.tile.rows, self.shape.tile.columns
        return pl.run_scoped(score, plgpu.ACC(shape, jnp.float32))

    def _weigh(self, block: jax.Array, scores: jax.Array, highest: jax.Array) -> _Weights:
        """Returns the weights of this group's block, of which it tells the other group."""
        keys = self.shape.tile.columns
        _, k_pe = self.memory.ring[0]
        place = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        last = jnp.minimum(self.job.last, self.job.end - 1)
        seen = place <= last - (self.job.begin + block * keys)
        scores = jnp.where(seen, scores * (self.shape.scale * math.log2(math.e)), _MASKED)
        highest = jnp.maximum(highest, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(highest, scores.shape, [0]))
        narrow = weights.astype(jnp.bfloat16)
        k_pe.at[self.index][...] = narrow
        self.memory.highest.at[self.index][...] = highest
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory.weighed.at[self.index])
        return _Weights(highest, weights.sum(axis=1), narrow)

    def _others_highest(self) -> jax.Array:
        """Returns the highest scores behind the block that the other group weighs, when it has."""
        other = 1 - self.index
        plgpu.barrier_wait(self.memory.weighed.at[other])
        held = self.memory.highest.at[other]
        return plgpu.load(held, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def _gather(
        self,
        weighted: jax.Array,
        block: jax.Array,
        stage: int,
        weights: jax.Array | None = None,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> tuple[jax.Array, Any]:
        """Returns weighted + weights @ this group's half of a block's latents, and `meanwhile`.

        The second block of the last pair may be none: its weights are zero, so that it changes no
        bit, if its latents are numbers.

        Args:
          weights: without, those that the other group has left.
          meanwhile: what is done while the product runs.
        """
        if stage == 1:
            pl.when(jnp.logical_not(self._exists(block)))(self._clear)
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

    def _clear(self) -> None:
        """Makes this group's half of the second stage zero."""
        c_kv, _ = self.memory.ring[0]
        latents = c_kv.at[1, self.index]
        zero = plgpu.layout_cast(jnp.zeros(latents.shape, latents.dtype), plgpu.Layout.WGMMA)
        latents[...] = zero
        plgpu.commit_smem()

    def _write_tree_row(self, block: jax.Array) -> None:
        """Puts the one tree row into its block: behind the cached rows, and zeros behind it.

        Both groups do so before the pair is scored.
        """
        if self.shape.tokens == 1:
            for stage in range(2):
                is_mixed = self._is_mixed(block + stage)
                pl.when(is_mixed)(functools.partial(self._write, stage))

    def _write(self, stage: int) -> None:
        keys, half = self.shape.tile.columns, self.shape.latent // CONSUMERS
        c_kv, k_pe = self.memory.ring[0]
        place = lax.rem(self.job.length, keys)
        self._await(stage)
        plgpu.barrier_wait(self.memory.row_ready)

        def write(block: Any, row: Any) -> None:
            held = plgpu.load(block, layout=plgpu.Layout.WGMMA)
            new = plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            at = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
            new = jnp.where(at == place, lax.broadcast_in_dim(new, held.shape, [1]), 0)
            block[...] = jnp.where(at < place, held, new)

        def write_part(part: jax.Array, _: None) -> None:
            columns = pl.ds(part * _WRITTEN, _WRITTEN)
            row = self.memory.row_c_kv.at[self.index, columns]
            write(c_kv.at[stage, self.index, :, columns], row)

        lax.fori_loop(0, half // _WRITTEN, write_part, None)
        if stage == self.index:
            write(k_pe.at[stage], self.memory.row_k_pe)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory.written)
        plgpu.barrier_wait(self.memory.written)

    def means(self, state: State) -> State:
        """Returns highest score, total weight and weighted means of the latents.

        Behind it both groups have done with the ring.
        """
        highest, total, weighted = state
        self.memory.total.at[self.index][...] = total
        plgpu.barrier_arrive(self.memory.done)
        plgpu.barrier_wait(self.memory.done)
        parts = [
            plgpu.load(
                self.memory.total.at[at], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
            )
            for at in range(CONSUMERS)
        ]
        total = parts[0] + parts[1]
        return highest, total, weighted * lax.broadcast_in_dim(1 / total, weighted.shape, [0])


def softmax(memory: Memory, job: Job, shape: Shape, group: int) -> State:
    """Returns highest score, total weight and a group's half of the weighted means of the latents.

    Args:
      group: static, 0 or 1.
    """
    work = _Group(memory, job, shape, group)
    return work.means(work.walk())


def _shrunk(highest: jax.Array, state: State) -> tuple[jax.Array, jax.Array]:
    """Returns total and weighted latents for another highest score."""
    before, total, weighted = state
    shrink = jnp.exp2(before - highest)
    return total * shrink, weighted * lax.broadcast_in_dim(shrink, weighted.shape, [0])
