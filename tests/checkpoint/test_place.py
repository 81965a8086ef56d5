"""Parameters go straight to any sharding, each tensor read once, no device holding another's part.

107 is the number in the log of public bug reports (section F).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.converted import convert_folder, copy_model, int4_golden, load
from fixtures.paths import REPOSITORY
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k26jax.checkpoint import place
from k26jax.checkpoint.load import load_params
from k26jax.checkpoint.models import declared_model
from k26jax.checkpoint.reader import Checkpoint, open_checkpoint
from k26jax.errors import CheckpointError

TARGET = REPOSITORY / "checkpoints" / "k26-tiny"
# Its 5 groups of 32 along the experts' width leave "ffn" whole here.
RULES = {"expert": "expert", "head": "model", "vocab": "model", "hidden": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    converted = tmp_path_factory.mktemp("place") / "converted"
    return {"published": TARGET, "converted": convert_folder(TARGET, converted, tp_size=1)}


@pytest.fixture(scope="module")
def whole():
    return load(TARGET)


def mesh(expert: int, model: int) -> Mesh:
    devices = np.array(jax.devices()[: expert * model]).reshape(expert, model)
    return Mesh(devices, ("expert", "model"))


def sharding_for(mesh: Mesh, rules=RULES):
    return lambda axes: NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in axes)))


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), found, expected)


@pytest.mark.parametrize(
    ("kind", "block_bytes"), [("published", 1), ("converted", place.BLOCK_BYTES)]
)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 8), (2, 4), (8, 1), (4, 2)])
def test_any_mesh_holds_the_same_values(kind, shape, block_bytes, folders, whole, monkeypatch):
    """With blocks of one layer and with all layers in one."""
    monkeypatch.setattr(place, "BLOCK_BYTES", block_bytes)
    placed = sharding_for(mesh(*shape))
    found = load(folders[kind], sharding_for=placed)
    assert_same(found, whole)
    assert found["moe"]["gate_proj"]["weight_packed"].sharding == placed(
        ("layer", "expert", "ffn", "hidden")
    )


def test_107_each_device_gets_its_part_and_nothing_else(folders, monkeypatch):
    """No array larger than a part is ever put on a device, and blocks are of one layer."""
    sizes, put = [], jax.device_put
    monkeypatch.setattr(place, "BLOCK_BYTES", 1)
    monkeypatch.setattr(jax, "device_put", lambda x, d: sizes.append((x.nbytes, d)) or put(x, d))
    grid = mesh(2, 4)
    found = load(folders["converted"], sharding_for=sharding_for(grid))
    largest = 0
    for leaf in jax.tree.leaves(found):
        part = leaf.sharding.shard_shape(leaf.shape)
        assert all(shard.data.shape == part for shard in leaf.addressable_shards)
        layers = leaf.shape[0] if leaf.ndim > 2 else 1
        largest = max(largest, int(np.prod(part)) * leaf.dtype.itemsize // layers)
    assert max(size for size, _ in sizes) == largest
    assert {device for _, device in sizes} == set(grid.devices.flat)
    packed = found["moe"]["gate_proj"]["weight_packed"]
    assert packed.addressable_shards[0].data.nbytes * 2 == packed.nbytes


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)])
def test_each_tensor_is_read_once_whatever_the_mesh(shape, monkeypatch):
    names, copy = [], Checkpoint.copy

    def count(self, name, region=None, shape=None):
        names.append(name)
        return copy(self, name, region, shape)

    monkeypatch.setattr(Checkpoint, "copy", count)
    load(TARGET, sharding_for=sharding_for(mesh(*shape)))
    with open_checkpoint(TARGET, num_hidden_layers=6) as checkpoint:
        assert sorted(names) == sorted(checkpoint.names())


def test_a_process_reads_only_what_its_devices_need(folders, monkeypatch):
    """Half of a mesh here, as with two processes: half of the experts and of the head rows."""
    grid = mesh(2, 1)
    mine = grid.devices.flat[0]

    class Half(NamedSharding):
        def addressable_devices_indices_map(self, shape):
            return {mine: super().addressable_devices_indices_map(shape)[mine]}

    read, copy = [], Checkpoint.copy

    def count(self, name, region=None, shape=None):
        values = copy(self, name, region, shape)
        read.append((name, values.shape))
        return values

    monkeypatch.setattr(Checkpoint, "copy", count)
    monkeypatch.setattr(
        jax, "make_array_from_single_device_arrays", lambda shape, sharding, arrays: arrays[0]
    )
    rules = {"expert": "expert", "vocab": "expert"}
    model = declared_model(TARGET)
    with open_checkpoint(TARGET, num_hidden_layers=model.layers) as checkpoint:
        parts = load_params(
            checkpoint,
            model.module,
            sharding_for=lambda axes: Half(grid, PartitionSpec(*(rules.get(a) for a in axes))),
        )
    experts = {name.split(".experts.")[1].split(".")[0] for name, _ in read if ".experts." in name
               and not name.endswith("_shape")}  # fmt: skip
    assert experts == {str(i) for i in range(8)}
    shapes = dict(read)
    assert shapes["lm_head.weight"] == (2048, 320)
    assert parts["moe"]["up_proj"]["weight_packed"].shape[1] == 8


def test_a_cut_layer_axis_is_refused(folders):
    placed = sharding_for(mesh(1, 2), {"layer": "model"})
    with pytest.raises(CheckpointError, match="layer axis cannot be cut"):
        load(folders["published"], sharding_for=placed)


def test_int4_parts_of_several_ranks_are_the_published_words(golden_dir, tmp_path):
    """Rows of gate and up, columns of down: words and scales of a rank belong together."""
    source = copy_model(int4_golden(golden_dir), tmp_path / "source")
    placed = sharding_for(mesh(1, 2), {"hidden": "model"})
    found, expected = load(source, sharding_for=placed), load(source)
    assert_same(found, expected)
    words = found["moe"]["gate_proj"]["weight_packed"].addressable_shards
    scales = found["moe"]["gate_proj"]["weight_scale"].addressable_shards
    for part, scale in zip(words, scales, strict=True):
        assert part.data.shape[-1] == 4 * scale.data.shape[-1]


def test_blocks_are_written_in_place(folders, monkeypatch):
    """The stack's buffer is donated: no second copy of a stack exists."""
    monkeypatch.setattr(place, "BLOCK_BYTES", 1)
    stack = jnp.zeros((3, 4))
    pointer = stack.unsafe_buffer_pointer()
    written = place._write(stack.sharding)(stack, jnp.ones((1, 4)), 1)
    assert stack.is_deleted()
    assert written.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(written, [[0] * 4, [1] * 4, [0] * 4])
