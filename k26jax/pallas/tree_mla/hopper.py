"""The partial softmax of tree_mla for Hopper: TMA loads, warp groups with their own work, wgmma.

Mosaic GPU, for bfloat16 and K2.6's sizes. A block of 64 rows meets blocks of 64 keys. One warp
group fetches; two others compute (`hopper_softmax`). Positions, blocks and parts are the ones of
`programs`; so are the bits' rules: a row meets the same products in the same order in every kind
of program.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from k26jax.errors import KernelError
from k26jax.pallas.gpu import architecture
from k26jax.pallas.tree_mla.hopper_softmax import CONSUMERS, PARTS, Memory, State, softmax
from k26jax.pallas.tree_mla.programs import Job, Shape, job_of
from k26jax.pallas.tree_mla.splits import piece_of

# What it offers changes with every JAX, more than its types say.
plgpu: Any = mosaic_gpu

# Of 504 a thread for three warp groups; the accumulator alone takes 128.
_REGISTERS = {"consumer": 232, "producer": 40}


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


def partials(*operands: jax.Array, shape: Shape) -> tuple[jax.Array, ...]:
    """Returns highest score, total weight [b, part, row] and mean latents [.., c] in float16.

    Parts that a row does not see hold anything, and so do rows past the last one. A mean is no
    larger than the largest latent, which must be below 65,504, as normed ones are.

    Args:
      operands: as in `Operands`, without the results.

    Raises: KernelError for pieces that are longer than a pair of key blocks.
    """
    pair = CONSUMERS * shape.tile.columns
    if piece_of(shape.tiers) > pair:
        raise KernelError(
            f"pieces of {piece_of(shape.tiers)} positions are longer than a pair of key blocks of "
            f"{shape.tile.columns}; let the first tier's splits be no longer than {pair}"
        )
    on = Operands._make((*operands, None, None, None))
    if shape.tokens == 1:
        # A load takes at most 256 elements of an axis.
        halves = on.tree_c_kv.reshape(shape.batch, CONSUMERS, -1)
        on = on._replace(tree_c_kv=halves, tree_k_pe=on.tree_k_pe.reshape(shape.batch, -1))
    parts = shape.batch, shape.n_parts
    # Stores of plain runs of numbers are not cut off at the end of an axis: whole tiles of rows.
    whole = shape.row_tiles * shape.tile.rows
    of_row = jax.ShapeDtypeStruct((*parts, whole), jnp.float32)
    means = jax.ShapeDtypeStruct((*parts, shape.rows, shape.latent), jnp.float16)
    kernel = plgpu.kernel(
        functools.partial(attend, shape=shape),
        out_type=[of_row, of_row, means],
        grid=(shape.programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
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
    half, narrow = shape.latent // CONSUMERS, _tiled(jnp.bfloat16)
    ring = plgpu.RefUnion(
        (narrow((stages, CONSUMERS, keys, half)), narrow((stages, keys, rope))),
        _tiled(jnp.float16)((CONSUMERS, rows, half)),
    )
    return {
        "q_latent": narrow((CONSUMERS, rows, half)),
        "q_pe": narrow((rows, rope)),
        "row_c_kv": plgpu.SMEM((CONSUMERS, half), jnp.bfloat16),
        "row_k_pe": plgpu.SMEM((rope,), jnp.bfloat16),
        "ring": ring,
        "highest": plgpu.SMEM((CONSUMERS, rows), jnp.float32),
        "total": plgpu.SMEM((CONSUMERS, rows), jnp.float32),
        # Copies arrive at these three.
        "query_ready": plgpu.Barrier(num_arrivals=1, num_barriers=PARTS),
        "row_ready": plgpu.Barrier(num_arrivals=2),
        "ready": plgpu.Barrier(num_arrivals=1, num_barriers=stages * PARTS),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=stages * CONSUMERS),
        "scored": plgpu.Barrier(num_arrivals=1),
        "weighed": plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
        "written": plgpu.Barrier(num_arrivals=CONSUMERS),
        "done": plgpu.Barrier(num_arrivals=CONSUMERS),
    }


def _tiled(dtype: Any) -> Any:
    """Returns what makes a shared array that TMA and wgmma lay out alike: 128-byte swizzle."""
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return functools.partial(
        plgpu.SMEM, dtype=dtype, transforms=(tiling, plgpu.SwizzleTransform(128))
    )


def attend(*refs: Any, shape: Shape, **scratch: Any) -> None:
    """One program: the partial softmax of one tile of rows over one part of the keys."""
    on, memory = Operands(*refs), Memory(**scratch)
    job = job_of(
        lax.axis_index("program"),
        on.lengths,
        lambda sequence, token: on.last[(sequence, token) if shape.tokens > 1 else sequence],
        shape,
    )
    group = lax.axis_index("group")

    @pl.when(job.needed & (group == CONSUMERS))
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS["producer"], action="decrease")
        _fetch(on, memory, job, shape)

    @pl.when(job.needed & (group < CONSUMERS))
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS["consumer"], action="increase")
        _store(on, memory, job, shape, group, softmax(memory, job, shape, group))


def _fetch(on: Operands, memory: Memory, job: Job, shape: Shape) -> None:
    """Loads the queries, then one key block after the other as stages of the ring become free."""
    keys, stages = shape.tile.columns, shape.tile.stages
    # First, so that they are there when the queries are on their way.
    layer, own_slot = on.layer[0], on.table[job.sequence, 0]
    if shape.tokens == 1:

        @pl.when(job.is_tail)
        def _() -> None:
            for source, target in (
                (on.tree_c_kv, memory.row_c_kv),
                (on.tree_k_pe, memory.row_k_pe),
            ):
                plgpu.copy_gmem_to_smem(source.at[job.sequence], target, memory.row_ready)

    n_cached = job.n_cached(keys)
    first_mixed = lax.div(job.length, keys) * keys

    def fetch(block: jax.Array, _: None) -> None:
        start = job.begin + block * keys
        slot, place = own_slot, start
        if shape.is_paged:
            entry = lax.div(jnp.minimum(start, jnp.maximum(job.length - 1, 0)), shape.page)
            slot, place = on.table[job.sequence, entry], start - entry * shape.page

        load = functools.partial(_load, on, memory, job, shape, block)

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
        for at in range(CONSUMERS):
            plgpu.barrier_wait(memory.free.at[lax.rem(block, stages) * CONSUMERS + at])

    lax.fori_loop(jnp.maximum(n_blocks - stages, 0), n_blocks, drain, None)


def _load(
    on: Operands,
    memory: Memory,
    job: Job,
    shape: Shape,
    block: jax.Array,
    c_kv_source: Any,
    k_pe_source: Any,
) -> None:
    """Loads a key block, part by part as they become free, and the queries next to the first.

    Args:
      c_kv_source, k_pe_source: the block's rows.
    """
    half = shape.latent // CONSUMERS
    c_kv, k_pe = memory.ring[0]
    stage, rows = lax.rem(block, shape.tile.stages), pl.ds(job.first_row, shape.tile.rows)

    def copy(part: int, query: Any, query_target: Any, source: Any, target: Any) -> None:
        # In the order in which they are multiplied.
        ready = memory.query_ready.at[part]
        pl.when(block == 0)(lambda: plgpu.copy_gmem_to_smem(query, query_target, ready))
        plgpu.copy_gmem_to_smem(source, target, memory.ready.at[stage * PARTS + part])

    for at in range(CONSUMERS):
        # A group has done with its half of the block that stood here before.
        free = memory.free.at[stage * CONSUMERS + at]
        pl.when(block >= shape.tile.stages)(functools.partial(plgpu.barrier_wait, free))
        columns = pl.ds(at * half, half)
        query = on.q_latent.at[job.sequence, rows, columns], memory.q_latent.at[at]
        copy(at, *query, c_kv_source.at[:, columns], c_kv.at[stage, at])
    # Its place held the weights of the block before, which one of the groups read with its half.
    query = on.q_pe.at[job.sequence, rows], memory.q_pe
    copy(CONSUMERS, *query, k_pe_source, k_pe.at[stage])


def _store(
    on: Operands, memory: Memory, job: Job, shape: Shape, group: jax.Array, state: State
) -> None:
    """Writes the partial result of this program's rows."""
    half = shape.latent // CONSUMERS
    gathered = memory.ring[1]
    highest, total, means = state
    gathered.at[group][...] = means.astype(jnp.float16)
    pl.when(group == 0)(lambda: _put(memory.highest.at[0], highest))
    pl.when(group == 1)(lambda: _put(memory.highest.at[1], total))
    plgpu.commit_smem()

    def copy(n_rows: int) -> None:
        rows, held = pl.ds(job.first_row, n_rows), pl.ds(0, n_rows)
        plgpu.copy_smem_to_gmem(
            gathered.at[group, held],
            on.weighted.at[job.sequence, job.part, rows, pl.ds(group * half, half)],
        )
        for at, target in enumerate((on.highest, on.total)):
            target = target.at[job.sequence, job.part, rows]
            source = memory.highest.at[at, held]
            pl.when(group == at)(functools.partial(plgpu.copy_smem_to_gmem, source, target))

    # A tail's tile holds rows of other tokens too, which are not its to write.
    pl.when(job.is_tail)(lambda: copy(min(shape.heads, shape.tile.rows)))
    pl.when(jnp.logical_not(job.is_tail))(lambda: copy(shape.tile.rows))
    # What is written is there when the kernel ends.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _put(target: Any, value: jax.Array) -> None:
    target[...] = value
