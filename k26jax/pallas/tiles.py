"""The tiles of every kernel on every architecture: the one table that tuning edits.

Row counts and splits are the same on a given architecture whatever the number of tokens, so a
row's arithmetic never depends on its neighbours.
"""

from __future__ import annotations

from k26jax.pallas.gpu import Tile, architecture

TILES: dict[str, dict[str, Tile]] = {
    # The layout's columns are one number for both products: int4_moe_up's.
    "int4_moe_up": {
        "sm_90": Tile(rows=8, columns=128, splits=8, warps=2, stages=3),
        "sm_100": Tile(rows=8, columns=128, splits=8, warps=2, stages=3),
        "sm_120": Tile(rows=8, columns=128, splits=8, warps=2, stages=3),
    },
    "int4_moe_down": {
        "sm_90": Tile(rows=8, columns=128, splits=2, chunk=4, warps=4, stages=3),
        "sm_100": Tile(rows=8, columns=128, splits=2, chunk=4, warps=4, stages=3),
        "sm_120": Tile(rows=8, columns=128, splits=2, chunk=4, warps=4, stages=2),
    },
    # Blocks of 16 rows and more, of prompts: there are programs enough without cutting sums.
    "int4_moe_up_many": dict.fromkeys(
        ("sm_90", "sm_100", "sm_120"), Tile(rows=64, columns=128, splits=2, warps=4, stages=3)
    ),
    "int4_moe_down_many": dict.fromkeys(
        ("sm_90", "sm_100", "sm_120"), Tile(rows=64, columns=128, splits=2, chunk=4, warps=4)
    ),
    "int4_moe_activate": dict.fromkeys(("sm_90", "sm_100", "sm_120"), Tile(warps=2, stages=1)),
    "int4_moe_combine": dict.fromkeys(
        ("sm_90", "sm_100", "sm_120"), Tile(columns=64, depth=256, warps=4, stages=2)
    ),
    # Products: short sums, sums in parts, few columns, many, many short sums. Which one follows
    # from the weights.
    "dense_short": {
        "sm_90": Tile(columns=16, splits=2, depth=256, warps=2, stages=3),
        "sm_100": Tile(columns=16, splits=2, depth=256, warps=2, stages=3),
        "sm_120": Tile(columns=16, splits=2, depth=256, warps=2, stages=3),
    },
    "dense_parts": dict.fromkeys(
        ("sm_90", "sm_100", "sm_120"), Tile(columns=32, splits=2, depth=128, warps=2, stages=4)
    ),
    "dense_narrow": {
        "sm_90": Tile(columns=16, splits=4, depth=128, warps=2, stages=4),
        "sm_100": Tile(columns=16, splits=4, depth=128, warps=2, stages=4),
        "sm_120": Tile(columns=16, splits=4, depth=128, warps=2, stages=3),
    },
    "dense_wide": {
        "sm_90": Tile(columns=64, splits=1, depth=128, warps=4, stages=4),
        "sm_100": Tile(columns=64, splits=1, depth=128, warps=4, stages=4),
        "sm_120": Tile(columns=64, splits=1, depth=128, warps=4, stages=4),
    },
    "dense_wide_short": {
        "sm_90": Tile(columns=32, splits=2, depth=128, warps=2, stages=4),
        # As on sm_90 it would spill.
        "sm_100": Tile(columns=64, splits=1, depth=128, warps=4, stages=4),
        "sm_120": Tile(columns=32, splits=2, depth=128, warps=2, stages=4),
    },
    "dense_absorb": {
        "sm_90": Tile(columns=32, depth=128, warps=4, stages=2),
        "sm_100": Tile(columns=32, depth=128, warps=4, stages=2),
        "sm_120": Tile(columns=32, depth=128, warps=4, stages=2),
    },
    "dense_values": {
        "sm_90": Tile(columns=16, splits=2, depth=128, warps=2, stages=3),
        "sm_100": Tile(columns=16, splits=2, depth=128, warps=2, stages=3),
        "sm_120": Tile(columns=16, splits=2, depth=128, warps=2, stages=3),
    },
    "tree_mla": {
        "sm_90": Tile(rows=64, columns=32, warps=8, stages=3),
        "sm_100": Tile(rows=64, columns=32, warps=8, stages=3),
        "sm_120": Tile(rows=16, columns=16, warps=8, stages=4),
    },
    "tree_mla_merge": {
        "sm_90": Tile(columns=128, splits=32, warps=4, stages=2),
        "sm_100": Tile(columns=128, splits=32, warps=4, stages=2),
        "sm_120": Tile(columns=128, splits=32, warps=4, stages=2),
    },
    # Rows of a block that share a key head, at most; fewer take fewer warps.
    "draft_attention": {
        "sm_90": Tile(rows=128, columns=64, warps=8, stages=3),
        "sm_100": Tile(rows=128, columns=64, warps=8, stages=3),
        "sm_120": Tile(rows=128, columns=32, warps=8, stages=3),
    },
    "draft_attention_float32": dict.fromkeys(
        ("sm_90", "sm_100", "sm_120"), Tile(rows=32, columns=16, warps=8, stages=2)
    ),
    "draft_attention_merge": dict.fromkeys(
        ("sm_90", "sm_100", "sm_120"), Tile(splits=32, warps=4, stages=2)
    ),
    "router": dict.fromkeys(("sm_90", "sm_100", "sm_120"), Tile(warps=1, stages=1)),
    "block_list": dict.fromkeys(("sm_90", "sm_100", "sm_120"), Tile(warps=16, stages=1)),
    # One token a program; norm_heads: heads of one program.
    "norm": {
        "sm_90": Tile(rows=1, warps=8),
        "sm_100": Tile(rows=1, warps=8),
        "sm_120": Tile(rows=1, warps=8),
    },
    "norm_latent": {
        "sm_90": Tile(rows=1, warps=4),
        "sm_100": Tile(rows=1, warps=4),
        "sm_120": Tile(rows=1, warps=4),
    },
    "norm_heads": {
        "sm_90": Tile(rows=1, columns=8, warps=2),
        "sm_100": Tile(rows=1, columns=8, warps=2),
        "sm_120": Tile(rows=1, columns=8, warps=2),
    },
    "norm_append": {
        "sm_90": Tile(rows=1, warps=1),
        "sm_100": Tile(rows=1, warps=1),
        "sm_120": Tile(rows=1, warps=1),
    },
    "best_token": dict.fromkeys(("sm_90", "sm_100", "sm_120"), Tile(columns=4096, stages=1)),
    "top_tokens_scan": dict.fromkeys(("sm_90", "sm_100", "sm_120"), Tile(columns=4096, stages=1)),
    "top_tokens": dict.fromkeys(("sm_90", "sm_100", "sm_120"), Tile(warps=16, stages=1)),
    "tree_build": dict.fromkeys(("sm_90", "sm_100", "sm_120"), Tile(warps=1, stages=1)),
}

# Of the kernel that runs on sm_90 alone, stages being those of its ring of key blocks; its merge.
TREE_MLA_HOPPER = Tile(rows=64, columns=64, stages=2)
TREE_MLA_HOPPER_MERGE = Tile(columns=32, splits=64, warps=4, stages=2)


def tile(kernel: str) -> Tile:
    """Returns the tile of a kernel on the GPU in context; interpreted ones take sm_90's."""
    return TILES[kernel][architecture() or "sm_90"]
