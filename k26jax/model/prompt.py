"""A prompt's rows before the cache holds them: written layer by layer, attended piece by piece."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from k26jax.model.cache import LatentCache
from k26jax.pallas.bits import pack_bits
from k26jax.pallas.tree_mla import tree_mla

# The kernel writes out what each new row sees of the others: for so many at once that is little.
PIECE_ROWS = 128


class PromptContext:
    """What a chunk of one prompt may look at, for a kernel that takes few new rows at once.

    Each layer's rows go into the cache first; a piece of the chunk then sees the earlier ones
    there, and its own rows as a chain. The bits are those of one piece, or of one row after the
    other: the kernel's sums have places that are fixed from position 0.
    """

    def __init__(
        self,
        cache: LatentCache,
        *,
        slot: jax.Array,
        start: jax.Array,
        count: jax.Array,
        width: int,
        kernels: str,
    ):
        """Takes the whole cache; `cache` is it with the rows of the layers so far.

        Args:
          slot, start: int32; where the first row goes.
          count: int32; rows that count. Others are not written and their results mean nothing.
          width: rows in all.
        """
        self.cache = cache
        self.shape = (1, width)
        self._slot, self._start, self._count, self._kernels = slot, start, count, kernels

    def attend(
        self,
        layer: int,
        q_latent: jax.Array,
        q_pe: jax.Array,
        c_kv: jax.Array,
        k_pe: jax.Array,
        *,
        scale: float,
        kernels: str,
    ) -> jax.Array:
        """Returns the attended latents [1, t, h, c]; `kernels`, of the other products, counts not.

        Args:
          q_latent, q_pe: [1, t, h, ..].   c_kv, k_pe: [1, t, ..].
        """
        del kernels
        self._write(layer, c_kv[0], k_pe[0])
        width = self.shape[1]
        slots = self._slot[None]
        done = []
        for first in range(0, width, PIECE_ROWS):
            piece = slice(first, min(first + PIECE_ROWS, width))
            rows = [part[:, piece] for part in (q_latent, q_pe)]
            own = [part[:, piece] for part in (c_kv, k_pe)]
            n = own[0].shape[1]
            attended = tree_mla(
                *rows,
                self.cache.c_kv,
                self.cache.k_pe,
                *own,
                layer=layer,
                slots=slots,
                lengths=self._start[None] + jnp.minimum(first, self._count),
                ancestors=pack_bits(jnp.tri(n, dtype=bool)[None]),
                scale=scale,
                kernels=self._kernels,
            )
            done.append(attended)
        return jnp.concatenate(done, axis=1)

    def _write(self, layer: int, c_kv: jax.Array, k_pe: jax.Array) -> None:
        row = jnp.arange(self.shape[1])
        place = jnp.where(row < self._count, self._start + row, self.cache.c_kv.shape[2])

        def written(cache: jax.Array, rows: jax.Array) -> jax.Array:
            at = cache.at[layer, self._slot, place]
            return at.set(rows.astype(cache.dtype), mode="drop", unique_indices=True)

        self.cache = dataclasses.replace(
            self.cache, c_kv=written(self.cache.c_kv, c_kv), k_pe=written(self.cache.k_pe, k_pe)
        )
