"""GPUs that are not there: their descriptions, and what is compiled for them."""

import re

import jax
import pytest

from k26jax.bench.compile_only import _copies
from k26jax.bench.programs import kernel_programs, rank_config
from k26jax.bench.targets import GPUS, gpu, target_config
from k26jax.errors import ConfigError
from k26jax.pallas.gpu import _KINDS
from k26jax.pallas.tiles import TILES


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_tiles_and_a_description(name):
    target = gpu(name)
    kinds = [arch for pattern, arch in _KINDS if re.search(pattern, target.name)]
    assert kinds == [target.architecture]
    assert all(target.architecture in tiles for tiles in TILES.values())
    text = target_config(target)
    assert text.count("{") == text.count("}")
    major, minor = target.capability
    assert f"major: {major} minor: {minor}" in text
    assert f"shared_memory_per_block_optin: {target.shared_bytes_per_block}\n" in text
    assert f'name: "{target.name}"' in text


def test_an_unknown_gpu_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"'h20'.*did you mean 'h200'"):
        gpu("h20")


def test_copies_are_counted_in_bytes():
    text = """
      %copy.1 = bf16[2,3,4]{2,1,0} copy(%p.1)
      %copy.2 = f32[] copy(%p.2)
      %fusion = f32[8]{0} fusion(%copy.1), calls=%c
      ROOT %copy.3 = s32[5]{0} copy(%p.3), metadata={}
    """
    assert _copies(text) == [48, 4, 20]


def test_the_checker_has_a_program_of_every_kernel():
    """Each kernel's first and last case can be traced from its abstract arguments."""
    by_kernel = {}
    for candidate in kernel_programs():
        by_kernel.setdefault(candidate.kernel, []).append(candidate)
    assert set(by_kernel) == {
        "dense", "norm", "router", "int4_moe", "tree_mla", "draft_attention", "vocab_topk",
        "tree_build",
    }  # fmt: skip
    for candidates in by_kernel.values():
        for candidate in (candidates[0], candidates[-1]):
            assert jax.tree.leaves(jax.eval_shape(candidate.function, *candidate.arguments))


def test_a_rank_of_kimi_k26():
    config = rank_config(61)
    assert len(config.moe_layer_ids) == 60
    # Eight ranks hold the model's 64 heads, 2048 columns an expert and 163,840 tokens.
    assert 8 * config.num_attention_heads == 64
    assert 8 * config.moe_intermediate_size == 2048
    assert 8 * config.vocab_size == 163840
