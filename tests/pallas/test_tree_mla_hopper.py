"""tree_mla's kernel for Hopper, interpreted: against the reference, and bit for bit against itself.

Latents are few; key blocks are those of the GPU, 64 positions, and splits end at 128 and 384. So
the ring of key blocks goes round.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.tree_mla import SCALE, Problem, words_of

from k26jax.errors import KernelError
from k26jax.pallas.gpu import OLDEST_JAX, platform
from k26jax.pallas.tree_mla import kernel
from k26jax.pallas.tree_mla.cases import Case
from k26jax.pallas.tree_mla.kernel import for_hopper

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < OLDEST_JAX, reason="older JAX does not interpret what the kernel uses"
)
# Paths of five rows reach over the border of a block from 61, of a split from 126 and 382; from the
# last one they take a split of two pairs of blocks for themselves.
CASE = Case("crossing", 5, 8, (0, 61, 126, 382), 448, 128, 64)


def run(problem: Problem) -> np.ndarray:
    """The kernel's result; interpreted, no two warp groups touched memory unordered on the way."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    found = problem.run("hopper")
    assert platform() != "cpu" or not get_races().races_found
    return found


@functools.cache
def crossing():
    problem = Problem(CASE, "bfloat16", depth=5)
    return problem, run(problem)


def test_equal_to_the_reference():
    problem, found = crossing()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, problem.run("reference"), rtol=0, atol=2e-2)


def test_a_tree_row_has_the_bits_of_plain_decoding():
    problem, found = crossing()
    rows = [0, 2, 4]
    plain = problem.plain(rows)
    assert set(plain.lengths) >= {65, 128, 386}
    found = found[:, rows].reshape(-1, 1, *found.shape[2:])
    np.testing.assert_array_equal(run(plain), found)


def test_rows_of_two_tiles_do_not_depend_on_their_number():
    problem = Problem(CASE._replace(rows=9, lengths=(250,)), "bfloat16")
    found = run(problem)
    np.testing.assert_allclose(found, problem.run("reference"), rtol=0, atol=2e-2)
    names = ("q_latent", "q_pe", "tree_c_kv", "tree_k_pe")
    fields = {name: getattr(problem, name)[:, :1] for name in names}
    fewer = problem.changed(**fields, seen=problem.seen[:, :1, :1])
    np.testing.assert_array_equal(run(fewer), found[:, :1])


def test_more_heads_than_a_tile():
    problem = Problem(CASE._replace(rows=1, heads=128, lengths=(70,), capacity=128), "bfloat16")
    found = run(problem)
    np.testing.assert_allclose(found, problem.run("reference"), rtol=0, atol=2e-2)


def test_pages_hold_the_same_bits():
    problem, found = crossing()
    np.testing.assert_array_equal(run(problem.in_pages(64)), found)


def test_pages_smaller_than_a_key_block_are_refused():
    with pytest.raises(KernelError, match="pages of 32 rows"):
        Problem(CASE, "bfloat16").in_pages(32).run("hopper")


def test_pieces_longer_than_a_pair_of_key_blocks_are_refused():
    problem = Problem(CASE, "bfloat16")
    with pytest.raises(KernelError, match="pieces of 256 positions"):
        kernel.tree_mla(
            *(problem.q_latent, problem.q_pe, problem.c_kv, problem.k_pe),
            *(problem.tree_c_kv, problem.tree_k_pe),
            layer=0,
            slots=problem.slots,
            lengths=problem.lengths,
            ancestors=words_of(problem.seen),
            scale=SCALE,
            tiers=((256, 1 << 20),),
            hopper=True,
        )


def _takes(kind: str, heads=8, tokens=1, latent=512, dtype="bfloat16", capacity=4160, pages=None):
    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("model",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return for_hopper(
            of(1, tokens, heads, latent),
            of(1, tokens, heads, 64),
            of(2, 1, capacity, latent),
            pages,
        )


def test_choice():
    pages = jnp.zeros((1, 4), jnp.int32)
    for tokens in (1, 2, 16, 64, 300):
        assert _takes("NVIDIA H200", tokens=tokens)
        assert not _takes("NVIDIA H200", tokens=tokens, dtype="float32")
    assert _takes("NVIDIA H100 80GB HBM3", heads=128, capacity=64, pages=pages)
    assert not _takes("NVIDIA H200", heads=4)
    assert not _takes("NVIDIA H200", latent=256)
    assert not _takes("NVIDIA H200", capacity=4161)
    assert not _takes("NVIDIA H200", capacity=32, pages=pages)
    assert not _takes("NVIDIA B200")
