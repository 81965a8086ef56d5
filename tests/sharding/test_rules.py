"""Which cuts are possible, and what is said of those that are not."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import pytest
from fixtures.pairs import Programs, tiny_configs
from jax.sharding import PartitionSpec as P
from mesh_programs import MESHES, placement_of, shared_by_eight

from k26jax.config import ModelConfig
from k26jax.engine.placement import place
from k26jax.errors import MeshError
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import abstract, declarations
from k26jax.model.target import Target
from k26jax.sharding.mesh import make_mesh
from k26jax.sharding.rules import MESH_AXES, RULES, partition_specs
from k26jax.spec.state import Models


@dataclass(frozen=True)
class Item:
    shape: tuple[int, ...]
    axes: tuple[str, ...]


def _ranks(expert: int, model: int) -> dict[str, int]:
    return {"expert": expert, "model": model}


def test_the_table_knows_every_axis_a_model_declares_and_cuts_for_mesh_axes_alone():
    model, draft = shared_by_eight()
    for module in (
        abstract(lambda rngs: Target(model, dtype=jnp.float32, rngs=rngs)),
        abstract(lambda rngs: Drafter(draft, dtype=jnp.float32, rngs=rngs)),
    ):
        for path, declared in declarations(module).items():
            assert set(declared.axes) <= set(RULES), path
    assert set(RULES.values()) == {None, *MESH_AXES}


def test_what_is_cut_and_along_which_axis():
    specs = placement_of(Programs(*shared_by_eight()), (2, 4)).specs
    cut = {path: tuple(spec) for path, spec in specs["target"].items() if any(spec)}
    assert cut == {
        "embed_tokens": ("model", None),
        "lm_head": ("model", None),
        "self_attn.q_b_proj": (None, "model", None),
        "self_attn.kv_b_proj": (None, "model", None, None),
        "self_attn.o_proj": (None, None, "model"),
        "mlp.gate_proj": (None, "model", None),
        "mlp.up_proj": (None, "model", None),
        "mlp.down_proj": (None, None, "model"),
        "moe.shared_experts.gate_proj": (None, "model", None),
        "moe.shared_experts.up_proj": (None, "model", None),
        "moe.shared_experts.down_proj": (None, None, "model"),
    } | {
        f"moe.{name}.{kind}": (None, "expert", *cut)
        for name, cut in (
            ("gate_proj", ("model", None)),
            ("up_proj", ("model", None)),
            ("down_proj", (None, "model")),
        )
        for kind in ("weight_packed", "weight_scale")
    }


def test_an_uneven_cut_names_the_tensor_and_the_numbers():
    declared = {"mlp.down_proj": Item((3, 64, 30), ("layer", "hidden", "ffn"))}
    assert partition_specs(declared, _ranks(1, 3), {}) == {"mlp.down_proj": P(None, None, "model")}
    with pytest.raises(MeshError) as error:
        partition_specs(declared, _ranks(2, 4), {})
    assert str(error.value) == (
        "mlp.down_proj [3, 64, 30]: its 30 entries along axis 'ffn' cannot be shared evenly by 4 "
        "ranks of mesh axis 'model'; --tp-size can be 1, 2, 3, 5, 6, 10, 15 or 30 here"
    )


def test_a_cut_through_a_head_is_refused_though_the_entries_divide():
    declared = {"q_proj": Item((60, 16), ("head", "hidden"))}
    partition_specs(declared, _ranks(1, 3), {"head": 6})
    with pytest.raises(MeshError, match=r"60 entries of 6 heads .* by 4 ranks"):
        partition_specs(declared, _ranks(1, 4), {"head": 6})


def test_int4_words_and_scales_are_cut_at_the_same_group_borders():
    """96 inputs are 12 words, which two ranks could share, under 3 scales, which they cannot."""
    axes = ("layer", "expert", "hidden", "ffn")
    declared = {
        "moe.down_proj.weight_packed": Item((2, 8, 64, 12), axes),
        "moe.down_proj.weight_scale": Item((2, 8, 64, 3), axes),
    }
    partition_specs(declared, _ranks(4, 3), {})
    with pytest.raises(MeshError, match="rows of 96 INT4 numbers have 3 scale groups of 32") as e:
        partition_specs(declared, _ranks(1, 2), {})
    assert "weight_packed [2, 8, 64, 12]" in str(e.value)
    assert "--tp-size can be 1 or 3 here" in str(e.value)


def test_two_axes_for_one_mesh_axis_and_unknown_axes_are_refused():
    with pytest.raises(MeshError, match=r"odd \[4, 4\]: axes 'head' and 'ffn' would both be cut"):
        partition_specs({"odd": Item((4, 4), ("head", "ffn"))}, _ranks(1, 2), {})
    with pytest.raises(MeshError, match=r"axis 'heads' .* did you mean 'head'"):
        partition_specs({"odd": Item((4,), ("heads",))}, _ranks(1, 2), {})


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(MeshError, match="takes 12 devices, and there are 8"):
        make_mesh(6, 2)
    assert make_mesh(1, 1) is None
    assert dict(make_mesh(2, 3).shape) == {"expert": 3, "model": 2}


def test_a_drafter_that_does_not_divide_is_whole_on_every_rank():
    model, draft = shared_by_eight()
    _, narrow = tiny_configs(model.vocab_size, num_hidden_layers=2)
    target = abstract(lambda rngs: Target(model, dtype=jnp.float32, rngs=rngs))
    for config, is_cut in ((draft, True), (narrow, False)):
        drafter = abstract(lambda rngs, c=config: Drafter(c, dtype=jnp.float32, rngs=rngs))
        placement = place(make_mesh(8, 1), Models(target, drafter))
        assert placement.is_drafter_cut is is_cut
        assert any(any(spec) for spec in placement.specs["drafter"].values()) is is_cut
        for name, module in (("target", target), ("drafter", drafter)):
            for path, declared in declarations(module).items():
                by_axes = placement.sharding_for(name)(declared.axes)
                assert by_axes == placement.shardings(name)[path], path


# What the golden models and the trained pair can be shared by: (expert, model).
SHARED = {
    "k2-like": [(1, 1), (1, 2), (1, 4), (2, 1), (2, 4)],
    "dsv3-like": [(1, 1), (1, 2), (1, 4), (2, 1), (2, 4), (8, 1), (4, 2)],
    "k2-int4": [(1, 1), (2, 1)],
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SHARED)
def test_meshes_that_golden_models_allow(golden_dir, name, mesh):
    """The list that the equality tests go by; every other mesh is refused by tensor and numbers."""
    config = ModelConfig.from_folder(golden_dir / "models" / name)
    models = Models(abstract(lambda rngs: Target(config, dtype=jnp.float32, rngs=rngs)))
    if mesh in SHARED[name]:
        place(make_mesh(mesh[1], mesh[0]), models)
        return
    with pytest.raises(MeshError, match=r"\w+ \[[\d, ]+\]: its .*\d+ ranks of mesh axis"):
        place(make_mesh(mesh[1], mesh[0]), models)
