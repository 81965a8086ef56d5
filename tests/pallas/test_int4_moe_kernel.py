"""The INT4 experts' kernel, interpreted: layout, sums, and rows that do not know of each other."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k26jax.checkpoint.int4 import pack_int4
from k26jax.errors import KernelError
from k26jax.pallas.gpu import platform
from k26jax.pallas.int4_moe import (
    BLOCK_ROWS,
    ExpertWeights,
    Shared,
    experts,
    kernel,
    prompt_block_rows,
)
from k26jax.pallas.int4_moe.cases import SMALL_CASES, Case
from k26jax.pallas.int4_moe.layout import TiledExperts, arrange
from k26jax.pallas.int4_moe.reference import add_shared
from k26jax.pallas.router.reference import block_list

COLUMNS, LAYER = 32, 1


@functools.cache
def weights(case: Case) -> tuple[list[ExpertWeights], list[np.ndarray]]:
    """Two layers of canonical weights, the first of them poison, and the second's values."""
    rng = np.random.default_rng([case.hidden, case.inner, case.n_experts])
    stacks, matrices = [], []
    for shape in [(case.inner, case.hidden)] * 2 + [(case.hidden, case.inner)]:
        values = rng.integers(-8, 8, (case.n_experts, *shape)).astype(np.int8)
        scales = rng.uniform(0.5, 1.5, (case.n_experts, shape[0], shape[1] // 32))
        scales = (scales / shape[1] ** 0.5 / 4.6).astype(ml_dtypes.bfloat16)
        words, all_scales = np.stack([pack_int4(values)] * 2), np.stack([scales] * 2)
        all_scales[1 - LAYER] = np.nan
        stacks.append(ExpertWeights(jnp.asarray(words), jnp.asarray(all_scales)))
        matrices.append(values * np.repeat(scales.astype(np.float32), 32, axis=-1))
    return stacks, matrices


@functools.cache
def tiled(case: Case):
    return jax.jit(arrange_all)(*weights(case)[0])


def arrange_all(gate, up, down) -> TiledExperts:
    return TiledExperts(
        arrange({"gate_proj": gate, "up_proj": up}, COLUMNS), arrange({"down_proj": down}, COLUMNS)
    )


@functools.cache
def routing(case: Case, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, distinct ids of each token (now and then of no expert) and weights."""
    rng = np.random.default_rng([rows, case.top_k])
    ids = np.stack([rng.permutation(case.n_experts + 1)[: case.top_k] for _ in range(rows)])
    x = rng.standard_normal((rows, case.hidden)).astype(np.float32)
    return x, ids.astype(np.int32), rng.uniform(0.1, 2, ids.shape).astype(np.float32)


def run(
    case: Case, x, ids, share, dtype=jnp.bfloat16, shared=None, result=jnp.float32
) -> np.ndarray:
    blocks = block_list(jnp.asarray(ids), case.n_experts, BLOCK_ROWS)
    out = kernel.experts(
        jnp.asarray(x, dtype), jnp.asarray(ids), jnp.asarray(share), blocks, tiled(case),
        layer=LAYER, inner=case.inner, shared=shared, dtype=result,
    )  # fmt: skip
    return np.asarray(out)


def run_in_blocks(case: Case, x, ids, share, rows: int) -> np.ndarray:
    """As of a prompt: in float32, blocks of so many rows."""
    blocks = block_list(jnp.asarray(ids), case.n_experts, rows)
    out = kernel.experts(
        jnp.asarray(x), jnp.asarray(ids), jnp.asarray(share), blocks, tiled(case),
        layer=LAYER, inner=case.inner, rows=rows,
    )  # fmt: skip
    return np.asarray(out)


def expected(case: Case, x, ids, share) -> np.ndarray:
    gate, up, down = (matrix.astype(np.float64) for matrix in weights(case)[1])
    out = np.zeros(x.shape)
    for token, choice in np.ndindex(ids.shape):
        expert = ids[token, choice]
        if 0 <= expert < case.n_experts:
            row = x[token].astype(np.float64)
            swish = gate[expert] @ row / (1 + np.exp(-gate[expert] @ row))
            out[token] += share[token, choice] * (down[expert] @ (swish * (up[expert] @ row)))
    return out


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_equals_the_sums_in_float64(case):
    inputs = routing(case, case.tokens)
    found = run(case, *inputs, dtype=jnp.float32)
    np.testing.assert_allclose(found, expected(case, *inputs), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", SMALL_CASES[1:3], ids=lambda case: case.name)
def test_bfloat16_equals_the_reference(case):
    x, ids, share = routing(case, case.tokens)
    found = run(case, x, ids, share)
    stacks = weights(case)[0]
    wanted = experts(jnp.asarray(x, jnp.bfloat16), ids, share, *stacks, layer=LAYER)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02 * np.abs(found).max())


@pytest.mark.parametrize("rows", [16, 64])
def test_blocks_of_a_prompt_equal_the_sums_in_float64(rows):
    case = SMALL_CASES[1]
    inputs = routing(case, 40)
    found = run_in_blocks(case, *inputs, rows)
    np.testing.assert_allclose(found, expected(case, *inputs), rtol=2e-5, atol=2e-5)


def test_blocks_of_a_prompt_grow_with_its_pairs():
    rows = [prompt_block_rows(8 * tokens, 384) for tokens in (1, 32, 256, 512, 1024, 4096)]
    assert rows == [8, 8, 8, 16, 32, 64]


def test_a_row_does_not_know_of_the_others():
    case = SMALL_CASES[1]
    x, ids, share = routing(case, case.tokens)
    together = run(case, x, ids, share)
    for row in range(0, case.tokens, 4):
        alone = run(case, x[row : row + 1], ids[row : row + 1], share[row : row + 1])
        np.testing.assert_array_equal(alone[0], together[row])


def test_all_rows_on_one_expert_fill_several_blocks():
    case = SMALL_CASES[1]
    x, ids, share = (np.copy(value) for value in routing(case, case.tokens))
    ids[:] = [[3, 1, 0]]
    found = run(case, x, ids, share, jnp.float32)
    np.testing.assert_allclose(found, expected(case, x, ids, share), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("idle", [-1, 5, 2**31 - 1, -(2**31)])
def test_idle_rows_of_nan_stay_alone_and_give_zero(idle):
    case = SMALL_CASES[1]
    x, ids, share = (np.copy(value) for value in routing(case, case.tokens))
    rows = [0, 9, 16]
    ids[rows], share[rows] = idle, np.nan
    clean = run(case, x, ids, share)
    x[rows] = np.nan
    poisoned = run(case, x, ids, share)
    assert (poisoned[rows] == 0).all()
    np.testing.assert_array_equal(poisoned, clean)


def shared_of(case: Case, rows: int, width: int) -> tuple[Shared, np.ndarray]:
    """A shared expert whose gate and up come in two parts, and its output in float64."""
    rng = np.random.default_rng([rows, width])
    gate, up = rng.standard_normal((2, 2, rows, width)).astype(np.float32)
    down = np.full((2, case.hidden, width), np.nan, np.float32)
    down[LAYER] = rng.standard_normal((case.hidden, width)) / width**0.5
    gates, ups = (part.astype(np.float64).sum(axis=0) for part in (gate, up))
    out = gates / (1 + np.exp(-gates)) * ups @ down[LAYER].T.astype(np.float64)
    return Shared(*map(jnp.asarray, (gate, up, down))), out


@pytest.mark.parametrize("width", [32, 200])
def test_the_shared_expert_is_added_last(width):
    case = SMALL_CASES[1]
    inputs = routing(case, case.tokens)
    shared, out = shared_of(case, case.tokens, width)
    found = run(case, *inputs, dtype=jnp.float32, shared=shared)
    np.testing.assert_allclose(found, expected(case, *inputs) + out, rtol=5e-5, atol=5e-5)
    plain = run(case, *inputs, dtype=jnp.float32)
    wanted = add_shared(jnp.asarray(plain), shared, layer=LAYER, kind=jnp.float32)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-5)


def test_a_row_of_the_shared_expert_does_not_know_of_the_others():
    case = SMALL_CASES[1]
    x, ids, share = routing(case, case.tokens)
    shared, _ = shared_of(case, case.tokens, 200)
    shared = jax.tree.map(lambda x: x.astype(jnp.bfloat16), shared)
    together = run(case, x, ids, share, shared=shared, result=jnp.bfloat16)
    assert together.dtype == jnp.bfloat16
    for row in range(0, case.tokens, 4):
        here = slice(row, row + 1)
        one = shared._replace(gate=shared.gate[:, here], up=shared.up[:, here])
        alone = run(case, x[here], ids[here], share[here], shared=one, result=jnp.bfloat16)
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_ranks_part_of_the_shared_expert_is_not_rounded():
    """In bfloat16 with a float32 result, which is summed over ranks before it is rounded."""
    case = SMALL_CASES[1]
    inputs = routing(case, case.tokens)
    shared, _ = shared_of(case, case.tokens, 64)
    shared = shared._replace(down=shared.down.astype(jnp.bfloat16))
    part = run(case, *inputs, shared=shared) - run(case, *inputs)
    exact = add_shared(
        jnp.zeros(part.shape), shared, layer=LAYER, kind=jnp.bfloat16, is_whole=False
    )
    np.testing.assert_allclose(part, exact, rtol=0, atol=1e-5)
    rounded = np.asarray(exact.astype(jnp.bfloat16), np.float32)
    assert np.abs(part - rounded).max() > 1e-3


@pytest.mark.parametrize("case", SMALL_CASES[:3], ids=lambda case: case.name)
def test_the_layout_holds_every_weight_once(case):
    """Each tile's plane, decoded in place, is the weight the canonical words hold there."""
    found = tiled(case)
    gate, up, down = weights(case)[1]
    for tiles, wanted in [
        (found.gate_up, np.concatenate([gate, up], axis=1)),
        (found.down, down),
    ]:
        words = np.asarray(tiles.words[LAYER]).astype(np.uint16)
        nibbles = (words[..., None] >> (4 * np.arange(4, dtype=np.uint16))) & 15
        pairs = np.asarray(tiles.scales[LAYER]).astype(np.uint32)
        halves = np.stack([pairs & 0xFFFF, pairs >> 16], axis=-1).astype(np.uint16)
        scales = halves.view(ml_dtypes.bfloat16).astype(np.float32)
        # [e, tile, step, column, lane, plane] and [e, tile, step, half, column, low or high]
        values = (nibbles.astype(np.float32) - 8).transpose(0, 1, 3, 2, 5, 4)
        scales = scales.transpose(0, 1, 4, 2, 3, 5)
        scales = scales.reshape(*scales.shape[:4], 4, 1)
        decoded = (values * scales).reshape(case.n_experts, -1, values.shape[3] * 128)
        _, outputs, inputs = wanted.shape
        np.testing.assert_array_equal(decoded[:, :outputs, :inputs], wanted)
        assert (decoded[:, outputs:] == 0).all()
        assert (decoded[..., inputs:] == 0).all()


def test_other_weights_have_no_layout():
    floats = ExpertWeights(jnp.zeros((1, 2, 32, 32)))
    with pytest.raises(KernelError, match=r"gate_proj.*kernels='reference'"):
        arrange_all(floats, floats, floats)


@pytest.mark.skipif(platform() != "cpu", reason="assembly runs inside kernels alone")
def test_decoding_in_bfloat16_rounds_once():
    word = jnp.asarray(np.arange(-(2**15), 2**15, 257, dtype=np.int32)[:32, None], jnp.int16)
    pair = jnp.full(word.shape[0], 0x3E993F0D, jnp.int32)
    for plane in range(4):
        found = kernel._decode(word, plane, pair, jnp.bfloat16)
        nibble = (np.asarray(word).astype(np.uint16) >> (4 * plane)) & 15
        scale = [0x3F0D, 0x3E99][plane % 2]
        scale = np.array(scale, np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        wanted = ((nibble.astype(np.float32) - 8) * scale).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(found), wanted)
