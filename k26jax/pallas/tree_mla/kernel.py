"""tree_mla in Pallas: key splits at fixed positions, a running softmax in each, one merge.

A tree row at depth d stands at position length + d, and its ancestors at the positions before.
Parts (splits, and pieces of a row's last split: see `splits`) that end at or before the length are
computed for all rows at once (shared programs). From the part that holds the length on, every token
has its own programs (tail), which take positions of the cache up to the length and of the token's
root path after it. Either kind adds up the same keys at the same places of the same products; so a
tree row's result has the bits that plain decoding of its root path gives. Two kernels do so:
`programs`, and `hopper` where it fits.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32, UInt32

from k26jax.errors import KernelError
from k26jax.pallas.bits import paths
from k26jax.pallas.gpu import Tile, architecture, launch, layer_operand
from k26jax.pallas.tiles import TREE_MLA_HOPPER, TREE_MLA_HOPPER_MERGE
from k26jax.pallas.tiles import tile as tile_of
from k26jax.pallas.tree_mla.programs import Shape, attend, merge, padded
from k26jax.pallas.tree_mla.splits import (
    HOPPER_TIERS,
    TIERS,
    Tiers,
    piece_of,
    split_of,
    split_start,
)


@functools.partial(jax.jit, static_argnames=("scale", "tile", "merge_tile", "tiers", "hopper"))
def tree_mla(
    q_latent: Float[Array, "b t h c"],
    q_pe: Float[Array, "b t h r"],
    cache_c_kv: Float[Array, "l slot s c"],
    cache_k_pe: Float[Array, "l slot s r"],
    tree_c_kv: Float[Array, "b t c"],
    tree_k_pe: Float[Array, "b t r"],
    *,
    layer: int | jax.Array,
    slots: Int32[Array, "b"],
    lengths: Int32[Array, "b"],
    ancestors: UInt32[Array, "b t words"],
    scale: float,
    page_table: Int32[Array, "b pages"] | None = None,
    tile: Tile | None = None,
    merge_tile: Tile | None = None,
    tiers: Tiers | None = None,
    hopper: bool | None = None,
) -> Float32[Array, "b t h c"]:
    """Returns each row's attended latent; arguments as in `reference.tree_mla`.

    Args:
      tile: rows (of all heads) and keys of one product; the table's without.
      merge_tile: parts and latent columns that the merge takes at once; the table's without.
      tiers: the partition of positions; another one gives other bits.
      hopper: whether the kernel for Hopper runs; without, where `for_hopper` says so.

    Raises: KernelError for pages that are no whole number of key blocks; on Hopper, for pieces
    that are longer than a pair of them.

    Cost: a float32 latent for each row and part that the capacity reaches. 64 rows of 8 heads:
    71 MB at a capacity of 8k, 148 MB at 32k, 219 MB at 128k, 286 MB at 256k. The kernel for
    Hopper, in float16: 24, 51, 101 and 168 MB.
    """
    if hopper is None:
        hopper = for_hopper(q_latent, q_pe, cache_c_kv, page_table)
    tile = tile or (TREE_MLA_HOPPER if hopper else tile_of("tree_mla"))
    merge_tile = merge_tile or (TREE_MLA_HOPPER_MERGE if hopper else tile_of("tree_mla_merge"))
    tiers = tiers or (HOPPER_TIERS if hopper else TIERS)
    shape = shape_of(q_latent, cache_c_kv, page_table, scale, tile, tiers)
    batch, latent = shape.batch, shape.latent
    # A sequence's slot is its one page.
    table = slots[:, None] if page_table is None else page_table
    route = paths(ancestors, padded(shape.tokens))
    operands = (
        layer_operand(layer),
        table,
        lengths,
        route,
        q_latent.reshape(batch, shape.rows, latent),
        q_pe.reshape(batch, shape.rows, -1),
        cache_c_kv,
        cache_k_pe,
        tree_c_kv,
        tree_k_pe,
    )
    attend_with = _partials_on_hopper if hopper else _partials
    partials = attend_with(*operands, shape=shape)
    return _merged(partials, lengths, route, shape, merge_tile).reshape(q_latent.shape)


def for_hopper(
    q_latent: jax.Array, q_pe: jax.Array, cache: jax.Array, page_table: jax.Array | None
) -> bool:
    """Returns whether the kernel for Hopper takes these shapes; the number of tokens is no matter.

    It is written for K2.6's sizes in bfloat16; its loads take rows eight at a time, and key blocks
    that lie in one page.
    """
    return (
        architecture() == "sm_90"
        and {q_latent.dtype, q_pe.dtype, cache.dtype} == {jnp.dtype("bfloat16")}
        and (q_latent.shape[-1], q_pe.shape[-1]) == (512, 64)
        and q_latent.shape[2] in (8, 16, 32, 64, 128)
        and cache.shape[2] % (8 if page_table is None else TREE_MLA_HOPPER.columns) == 0
    )


def _partials(*operands: jax.Array, shape: Shape) -> tuple[jax.Array, ...]:
    """Returns highest score, total weight [b, part, row] and weighted latents [.., c]."""
    tile = shape.tile
    if shape.is_paged:
        # Half of the stages go to looking pages up; see `attend`.
        tile = replace(tile, stages=2 * tile.stages - 1)
    return launch(
        functools.partial(attend, shape=shape),
        *operands,
        name="tree_mla",
        grid=(shape.programs,),
        out_shape=[
            jax.ShapeDtypeStruct((shape.batch, shape.n_parts, shape.rows, *width), jnp.float32)
            for width in ((), (), (shape.latent,))
        ],
        tile=tile,
    )


def _partials_on_hopper(*operands: jax.Array, shape: Shape) -> tuple[jax.Array, ...]:
    """Returns what `_partials` returns, for another partition of positions."""
    # Not where nobody needs it: Mosaic GPU asks for more packages than the rest.
    from k26jax.pallas.tree_mla import hopper, staging

    layer, table, lengths, route, q_latent, q_pe, c_kv, k_pe, tree_c_kv, tree_k_pe = operands
    numbers = layer, table, lengths
    last, *tree = lengths, tree_c_kv, tree_k_pe
    if shape.tokens > 1:
        last, *tree = staging.staged(*numbers, route, c_kv, k_pe, *tree, shape=shape)
    return hopper.partials(*numbers, last, q_latent, q_pe, c_kv, k_pe, *tree, shape=shape)


def _merged(
    partials: tuple[jax.Array, ...],
    lengths: jax.Array,
    route: jax.Array,
    shape: Shape,
    tile: Tile,
) -> jax.Array:
    """Returns the attended latents [b, t * h, c] of the parts' results."""
    return launch(
        functools.partial(merge, shape=shape, tile=tile),
        lengths,
        route,
        *partials,
        name="tree_mla_merge",
        grid=(shape.batch * shape.rows * pl.cdiv(shape.latent, tile.columns),),
        out_shape=jax.ShapeDtypeStruct((shape.batch, shape.rows, shape.latent), jnp.float32),
        tile=tile,
    )


def shape_of(
    q_latent: jax.Array,
    cache: jax.Array,
    page_table: jax.Array | None,
    scale: float,
    tile: Tile,
    tiers: Tiers,
) -> Shape:
    """Returns the sizes of a launch.

    Raises: KernelError for pages that are no whole number of key blocks.
    """
    batch, tokens, heads, latent = q_latent.shape
    capacity = page = cache.shape[2]
    if page_table is not None:
        if page % tile.columns:
            raise KernelError(
                f"pages of {page} rows are no whole number of key blocks of {tile.columns}; "
                "use a power of two of at least 64"
            )
        capacity *= page_table.shape[1]
    n_splits = int(split_of(capacity + tokens - 1, tiers, np))
    piece = piece_of(tiers)
    longest = int(split_start(n_splits + 1, tiers, np) - split_start(n_splits, tiers, np))
    return Shape(
        batch=batch,
        tokens=tokens,
        heads=heads,
        latent=latent,
        n_splits=n_splits,
        n_pieces=longest // piece,
        n_tail=1 + pl.cdiv(tokens - 1, piece),
        n_mixed=1 + pl.cdiv(tokens - 1, tile.columns),
        page=page,
        is_paged=page_table is not None,
        tile=tile,
        tiers=tiers,
        scale=scale,
    )
