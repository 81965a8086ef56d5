"""The partial softmax of tree_mla for Hopper: TMA loads, warp groups with their own work, wgmma.

Mosaic GPU, for bfloat16 and K2.6's sizes. A block of 64 threads' rows meets blocks of 64 keys. One
warp group fetches; two others compute the same scores each and gather half of the latents each,
so that they need nothing of each other. Positions, blocks and splits are the ones of `programs`;
so are the bits' rules: a row meets the same products in the same order in every kind of program.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from k26jax.pallas.gpu import architecture
from k26jax.pallas.tree_mla.programs import Job, Shape, job_of

# What it offers changes with every JAX, more than its types say.
plgpu: Any = mosaic_gpu

_MASKED = -1e30
_CONSUMERS = 2
# Columns of a key block that are rewritten at once; more need more registers than there are.
_WRITTEN = 64
# Of 504 a thread for three warp groups; the accumulator alone takes 128.
_REGISTERS = {"consumer": 232, "producer": 40}

State = tuple[jax.Array, jax.Array, jax.Array]


class Operands(NamedTuple):
    """References of `attend` in their order: what it reads, then the partials it writes.

    table: pages of each sequence; its slot where there is no page table.
    last: the last position that each tree row sees; the lengths where each has one tree row.
    tree_c_kv, tree_k_pe: each tree row's mixed blocks (see `staging`); where there is one tree row,
      that row.
    """

    layer: Any
    table: Any
    lengths: Any
    last: Any
    q_latent: Any
    q_pe: Any
    cache_c_kv: Any
    cache_k_pe: Any
    tree_c_kv: Any
    tree_k_pe: Any
    highest: Any
    total: Any
    weighted: Any


@dataclass(frozen=True)
class _Memory:
    """A program's shared memory and barriers.

    row_c_kv, row_k_pe: the tree row, where there is one.
    ring: key blocks, latent and rotary; later the weighted latents, in the same place.
    query_ready: the queries and the tree row are there.
    ready, free: a stage of the ring is filled; both consumers have read it.
    scored: the first consumer has its scores of a stage; the second one's begin then, so that one
      weighs while the other multiplies.
    written: both consumers have put the tree row into its block.
    done: both consumers have read all of the ring.
    """

    q_latent: Any
    q_pe: Any
    row_c_kv: Any
    row_k_pe: Any
    ring: Any
    highest: Any
    total: Any
    query_ready: Any
    ready: Any
    free: Any
    scored: Any
    written: Any
    done: Any


def partials(*operands: jax.Array, shape: Shape) -> tuple[jax.Array, ...]:
    """Returns highest score, total weight [b, split, row] and weighted latents [.., c] in float32.

    Splits that a row does not see hold anything, and so do rows past the last one.

    Args:
      operands: as in `Operands`, without the results.
    """
    on = Operands._make((*operands, None, None, None))
    if shape.tokens == 1:
        # A load takes at most 256 elements of an axis.
        halves = on.tree_c_kv.reshape(shape.batch, _CONSUMERS, -1)
        on = on._replace(tree_c_kv=halves, tree_k_pe=on.tree_k_pe.reshape(shape.batch, -1))
    splits = shape.batch, shape.n_parts
    # Stores of plain runs of numbers are not cut off at the end of an axis: whole tiles of rows.
    whole = shape.row_tiles * shape.tile.rows
    rows = (whole,), (whole,), (shape.rows, shape.latent)
    kernel = plgpu.kernel(
        functools.partial(attend, shape=shape),
        out_type=[jax.ShapeDtypeStruct((*splits, *of_row), jnp.float32) for of_row in rows],
        grid=(shape.programs,),
        grid_names=("program",),
        num_threads=_CONSUMERS + 1,
        thread_name="group",
        scratch_types=_scratch(shape, on.q_pe.shape[-1]),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_interpreter() if architecture() is None else None,
        kernel_name="tree_mla_hopper",
    )
    return tuple(kernel(*on[:-3]))


def _interpreter() -> Any:
    """Returns how the kernel is interpreted: looking for races, of which tests ask."""
    return plgpu.InterpretGPUParams(detect_races=True)


def _scratch(shape: Shape, rope: int) -> dict[str, Any]:
    rows, keys, stages = shape.tile.rows, shape.tile.columns, shape.tile.stages
    narrow = _tiled(jnp.bfloat16)
    ring = plgpu.RefUnion(
        (narrow((stages, keys, shape.latent)), narrow((stages, keys, rope))),
        _tiled(jnp.float32)((_CONSUMERS, rows, shape.latent // _CONSUMERS)),
    )
    return {
        "q_latent": narrow((rows, shape.latent)),
        "q_pe": narrow((rows, rope)),
        "row_c_kv": plgpu.SMEM((_CONSUMERS, shape.latent // _CONSUMERS), jnp.bfloat16),
        "row_k_pe": plgpu.SMEM((rope,), jnp.bfloat16),
        "ring": ring,
        "highest": plgpu.SMEM((rows,), jnp.float32),
        "total": plgpu.SMEM((rows,), jnp.float32),
        # Copies arrive at these two.
        "query_ready": plgpu.Barrier(num_arrivals=4 if shape.tokens == 1 else 2),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
        "scored": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        "written": plgpu.Barrier(num_arrivals=_CONSUMERS),
        "done": plgpu.Barrier(num_arrivals=_CONSUMERS),
    }


def _tiled(dtype: Any) -> Any:
    """Returns what makes a shared array that TMA and wgmma lay out alike: 128-byte swizzle."""
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return functools.partial(
        plgpu.SMEM, dtype=dtype, transforms=(tiling, plgpu.SwizzleTransform(128))
    )


def attend(*refs: Any, shape: Shape, **scratch: Any) -> None:
    """One program: the partial softmax of one tile of rows over one split of keys."""
    on, memory = Operands(*refs), _Memory(**scratch)
    job = job_of(
        lax.axis_index("program"),
        on.lengths,
        lambda sequence, token: on.last[(sequence, token) if shape.tokens > 1 else sequence],
        shape,
    )
    group = lax.axis_index("group")

    @pl.when(job.needed & (group == _CONSUMERS))
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS["producer"], action="decrease")
        _fetch(on, memory, job, shape)

    @pl.when(job.needed & (group < _CONSUMERS))
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS["consumer"], action="increase")
        state = _softmax(memory, job, shape, group)
        _store(on, memory, job, shape, group, state)


def _fetch(on: Operands, memory: _Memory, job: Job, shape: Shape) -> None:
    """Loads the queries, then one key block after the other as stages of the ring become free."""
    keys, stages = shape.tile.columns, shape.tile.stages
    c_kv, k_pe = memory.ring[0]
    # First, so that they are there when the queries are on their way.
    layer, own_slot = on.layer[0], on.table[job.sequence, 0]
    rows = pl.ds(job.first_row, shape.tile.rows)
    for source, target in ((on.q_latent, memory.q_latent), (on.q_pe, memory.q_pe)):
        plgpu.copy_gmem_to_smem(source.at[job.sequence, rows], target, memory.query_ready)
    if shape.tokens == 1:
        for source, target in (
            (on.tree_c_kv, memory.row_c_kv),
            (on.tree_k_pe, memory.row_k_pe),
        ):
            plgpu.copy_gmem_to_smem(source.at[job.sequence], target, memory.query_ready)
    n_cached = job.n_cached(keys)
    first_mixed = lax.div(job.length, keys) * keys

    def fetch(block: jax.Array, _: None) -> None:
        stage = lax.rem(block, stages)
        start = job.begin + block * keys
        slot, place = own_slot, start
        if shape.is_paged:
            entry = lax.div(jnp.minimum(start, jnp.maximum(job.length - 1, 0)), shape.page)
            slot, place = on.table[job.sequence, entry], start - entry * shape.page

        @pl.when(block >= stages)
        def _() -> None:
            plgpu.barrier_wait(memory.free.at[stage])

        def load(c_kv_source: Any, k_pe_source: Any) -> None:
            for source, target in ((c_kv_source, c_kv), (k_pe_source, k_pe)):
                plgpu.copy_gmem_to_smem(source, target.at[stage], memory.ready.at[stage])

        @pl.when((block < n_cached) | (shape.tokens == 1))
        def _() -> None:
            at = layer, slot, pl.ds(place, keys)
            load(on.cache_c_kv.at[at], on.cache_k_pe.at[at])

        if shape.tokens > 1:

            @pl.when(block >= n_cached)
            def _() -> None:
                at = job.sequence, job.token, pl.ds(start - first_mixed, keys)
                load(on.tree_c_kv.at[at], on.tree_k_pe.at[at])

    n_blocks = job.n_blocks(keys)
    lax.fori_loop(0, n_blocks, fetch, None)

    # The interpreter lets no barrier go whose last phase nobody has seen.
    def drain(block: jax.Array, _: None) -> None:
        plgpu.barrier_wait(memory.free.at[lax.rem(block, stages)])

    lax.fori_loop(jnp.maximum(n_blocks - stages, 0), n_blocks, drain, None)


def _softmax(memory: _Memory, job: Job, shape: Shape, group: jax.Array) -> State:
    """Returns highest score, total weight and this group's half of the weighted latents."""
    rows, keys, stages = shape.tile.rows, shape.tile.columns, shape.tile.stages
    half = shape.latent // _CONSUMERS
    c_kv, k_pe = memory.ring[0]
    n_cached = job.n_cached(keys)
    plgpu.barrier_wait(memory.query_ready)

    def absorb(block: jax.Array, state: State) -> State:
        highest, total, weighted = state
        stage = lax.rem(block, stages)
        plgpu.barrier_wait(memory.ready.at[stage])
        if shape.tokens == 1:

            @pl.when(block >= n_cached)
            def _() -> None:
                _write_tree_row(memory, job, shape, group, stage)

        pl.when(group == 1)(lambda: plgpu.barrier_wait(memory.scored.at[stage]))

        def score(scores: Any) -> jax.Array:
            plgpu.wgmma(scores, memory.q_latent, c_kv.at[stage].transpose((1, 0)))
            plgpu.wgmma(scores, memory.q_pe, k_pe.at[stage].transpose((1, 0)))
            return scores[...]

        scores = pl.run_scoped(score, plgpu.ACC((rows, keys), jnp.float32))
        pl.when(group == 0)(lambda: plgpu.barrier_arrive(memory.scored.at[stage]))
        place = plgpu.broadcasted_iota(jnp.int32, (rows, keys), 1, layout=plgpu.Layout.WGMMA)
        seen = place <= job.last - (job.begin + block * keys)
        scores = jnp.where(seen, scores * (shape.scale * math.log2(math.e)), _MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_highest, scores.shape, [0]))
        shrink = jnp.exp2(highest - new_highest)
        weighted = _gather(
            weighted * lax.broadcast_in_dim(shrink, weighted.shape, [0]),
            weights.astype(jnp.bfloat16),
            c_kv.at[stage, :, pl.ds(group * half, half)],
        )
        plgpu.barrier_arrive(memory.free.at[stage])
        return new_highest, total * shrink + weights.sum(axis=1), weighted

    row_layout = plgpu.Layout.WGMMA.reduce(1)
    start = (
        plgpu.layout_cast(jnp.full((rows,), _MASKED, jnp.float32), row_layout),
        plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), row_layout),
        plgpu.layout_cast(jnp.zeros((rows, half), jnp.float32), plgpu.Layout.WGMMA),
    )
    return lax.fori_loop(0, job.n_blocks(keys), absorb, start)


def _write_tree_row(
    memory: _Memory, job: Job, shape: Shape, group: jax.Array, stage: jax.Array
) -> None:
    """Puts the one tree row at its place behind the cached rows, and zeros behind it."""
    keys, half = shape.tile.columns, shape.latent // _CONSUMERS
    c_kv, k_pe = memory.ring[0]
    place = job.length - lax.div(job.length, keys) * keys

    def write(block: Any, row: Any) -> None:
        held = plgpu.load(block, layout=plgpu.Layout.WGMMA)
        new = plgpu.load(row, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        at = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
        new = jnp.where(at == place, lax.broadcast_in_dim(new, held.shape, [1]), 0)
        block[...] = jnp.where(at < place, held, new)

    def write_part(part: jax.Array, _: None) -> None:
        columns = pl.ds(group * half + part * _WRITTEN, _WRITTEN)
        row = memory.row_c_kv.at[group, pl.ds(part * _WRITTEN, _WRITTEN)]
        write(c_kv.at[stage, :, columns], row)

    lax.fori_loop(0, half // _WRITTEN, write_part, None)
    pl.when(group == 0)(lambda: write(k_pe.at[stage], memory.row_k_pe))
    plgpu.commit_smem()
    plgpu.barrier_arrive(memory.written)
    plgpu.barrier_wait(memory.written)


def _gather(weighted: jax.Array, weights: jax.Array, latents: Any) -> jax.Array:
    """Returns weighted + weights @ latents."""
    if architecture() is None:
        # The interpreter knows no accumulator that starts with a value.
        held = latents[...]
        # Unlike a product's, this read is not done before others in the eyes of later loads.
        plgpu.commit_smem()
        return weighted + jnp.dot(weights, held, preferred_element_type=jnp.float32)

    def add(sums: Any) -> None:
        plgpu.wgmma(sums, weights, latents)

    return pl.run_state(add)(plgpu.ACC.init(weighted))


def _store(
    on: Operands, memory: _Memory, job: Job, shape: Shape, group: jax.Array, state: State
) -> None:
    """Writes the partial result of this program's rows."""
    half = shape.latent // _CONSUMERS
    gathered = memory.ring[1]
    plgpu.barrier_arrive(memory.done)
    plgpu.barrier_wait(memory.done)
    highest, total, weighted = state
    gathered[group] = weighted

    @pl.when(group == 0)
    def _() -> None:
        memory.highest[...] = highest
        memory.total[...] = total

    plgpu.commit_smem()

    def copy(n_rows: int) -> None:
        rows = pl.ds(job.first_row, n_rows)
        held = pl.ds(0, n_rows)
        plgpu.copy_smem_to_gmem(
            gathered.at[group, held],
            on.weighted.at[job.sequence, job.part, rows, pl.ds(group * half, half)],
        )

        @pl.when(group == 0)
        def _() -> None:
            for source, target in ((memory.highest, on.highest), (memory.total, on.total)):
                plgpu.copy_smem_to_gmem(source.at[held], target.at[job.sequence, job.part, rows])

    # A tail's tile holds rows of other tokens too, which are not its to write.
    pl.when(job.is_tail)(lambda: copy(min(shape.heads, shape.tile.rows)))
    pl.when(jnp.logical_not(job.is_tail))(lambda: copy(shape.tile.rows))
    plgpu.wait_smem_to_gmem(0)
