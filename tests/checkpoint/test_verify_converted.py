"""verify against damaged converted folders, numbered as section F of the bug log."""

import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from fixtures.converted import (
    INDEX,
    convert_folder,
    copy_model,
    data_files,
    flip_bit,
    int4_golden,
    load,
    rewrite,
    value,
)
from fixtures.paths import REPOSITORY
from fixtures.shards import write_shard
from safetensors.numpy import load_file

from k26jax.checkpoint.reader import open_checkpoint
from k26jax.checkpoint.verify import verify
from k26jax.errors import CheckpointError

NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def golden(golden_dir, tmp_path_factory):
    """An INT4 model, published and converted; never changed."""
    source = copy_model(int4_golden(golden_dir), tmp_path_factory.mktemp("golden") / "source")
    return source, convert_folder(source, source.parent / "converted")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The trained target and its converted folder; its scales are large enough to lie alone."""
    folder = REPOSITORY / "checkpoints" / "k26-tiny"
    return folder, convert_folder(folder, tmp_path_factory.mktemp("trained") / "converted")


@pytest.fixture
def source(golden, tmp_path):
    return Path(shutil.copytree(golden[0], tmp_path / "source"))


@pytest.fixture
def converted(golden, tmp_path):
    return Path(shutil.copytree(golden[1], tmp_path / "converted"))


def differs(folder: Path, *words, against: Path | None = None) -> None:
    faults = verify(folder, against).faults
    assert faults
    for word in words:
        assert word in faults[0]
    with pytest.raises(CheckpointError, match="did not pass `k26jax verify`"):
        open_checkpoint(folder)


@pytest.mark.parametrize("part", ["packed", "scale"])
def test_a_flipped_bit_in_weights_or_scales_names_its_tensor(part, trained, tmp_path):
    name = f"{EXPERT}.weight_{part}"
    converted = Path(shutil.copytree(trained[1], tmp_path / "converted"))
    flip_bit(converted / "layer_00002", value(trained[0], name).tobytes())
    differs(converted, repr(name), "layer_00002")
    assert len(verify(converted).faults) == 1


def test_a_flipped_bit_anywhere_in_a_tree_is_seen_or_harmless(golden, converted):
    """Small arrays lie compressed among the tree's records; superseded records are of no use."""
    expected, rng = load(golden[1]), np.random.default_rng(8)
    for _ in range(16):
        path = rng.choice(sorted(data_files(converted / "layer_00002")))
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        if not verify(converted).faults:
            jax.tree.map(np.testing.assert_array_equal, load(converted), expected)
        path.write_bytes(data)


def test_106_a_folder_that_failed_is_refused_until_it_passes(golden, converted):
    tree = converted / "layer_00002"
    flip_bit(tree, value(golden[0], f"{EXPERT}.weight_packed").tobytes())
    assert load(converted)  # nobody has looked yet
    differs(converted, EXPERT)
    with pytest.raises(CheckpointError, match=EXPERT):
        load(converted)
    shutil.rmtree(tree)
    shutil.copytree(golden[1] / "layer_00002", tree)
    assert not verify(converted).faults
    assert load(converted)


def test_a_file_or_a_tree_that_is_missing(golden, converted):
    biggest = next(data_files(converted / "layer_00001"))
    biggest.unlink()
    differs(converted, "layer_00001", "cannot be read")
    shutil.rmtree(converted / "layer_00001")
    differs(converted, "lacks its tree layer_00001")
    (converted / "k26jax_verify_failed.json").unlink()
    with pytest.raises(CheckpointError, match="lacks its tree"):
        open_checkpoint(converted)


def test_a_data_file_that_is_cut(converted):
    biggest = next(data_files(converted / "layer_00001"))
    os.truncate(biggest, biggest.stat().st_size // 2)
    differs(converted, "layer_00001")


def test_a_layer_from_another_model(golden, converted, tmp_path):
    """Same shapes, other weights; and another layer of the same model."""
    other = Path(shutil.copytree(golden[0], tmp_path / "other"))
    rng = np.random.default_rng(3)
    for path in other.glob("*.safetensors"):
        tensors = load_file(path)
        for name, array in tensors.items():
            if not name.endswith("_shape"):
                noise = rng.integers(1, 8, array.shape).astype(array.dtype)
                tensors[name] = (array + noise).astype(array.dtype)
        write_shard(path, tensors)
    foreign = convert_folder(other, tmp_path / "foreign")
    for tree in (foreign / "layer_00002", golden[1] / "layer_00003"):
        shutil.rmtree(converted / "layer_00002")
        shutil.copytree(tree, converted / "layer_00002")
        differs(converted, "model.layers.2.", "layer_00002", "another model's")
    differs(foreign, "model.layers.0.", "differs from the one in", against=golden[0])


def test_a_layer_of_other_shapes(golden, converted):
    shutil.rmtree(converted / "layer_00002")
    shutil.copytree(golden[1] / "layer_00000", converted / "layer_00002")
    differs(converted, "layer_00002", "another model's")


def test_a_tree_that_cannot_be_read_is_not_said_to_be_another_models(converted):
    (converted / "layer_00002" / "manifest.ocdbt").write_bytes(b"")
    (fault,) = verify(converted).faults
    assert "cannot be read" in fault
    assert "the whole tree" in fault
    assert "another model" not in fault


def test_against_the_source_it_came_from(golden, converted, source):
    assert not verify(converted, source).faults
    values = value(source, NORM)
    values[3] += np.asarray(1, values.dtype)
    rewrite(source, {NORM: values})
    differs(converted, repr(NORM), "differs from the one in", against=source)


def test_109_a_converted_folder_is_self_contained(golden_dir, source, tmp_path):
    for name in ("chat_template.jinja", "LICENSE", "tiktoken.model", "tokenizer_config.json"):
        (source / name).write_text(name)
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    converted = convert_folder(source, tmp_path / "target")
    kept = {path.name for path in converted.iterdir() if path.is_file()}
    assert {"chat_template.jinja", "LICENSE", "tiktoken.model", "config.json"} <= kept
    assert "generation_config.json" in kept
    assert not {name for name in kept if name.endswith((".bin", ".safetensors"))} | ({INDEX} & kept)
    assert not any("tokenizer" in note for note in verify(converted).notes)
    (converted / "LICENSE").unlink()
    (converted / "config.json").write_text("{}")
    faults = " ".join(verify(converted).faults)
    assert "LICENSE is missing" in faults
    assert "config.json is not the file that was converted" in faults


def test_109_a_model_without_a_tokenizer_is_said_to_have_none(golden):
    assert any("no tokenizer" in note for note in verify(golden[1]).notes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: "[]", "damaged"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version 2"),
        (lambda text: text.replace('"sha256"', '"sha257"'), "damaged"),
    ],
)
def test_a_manifest_that_is_damaged_or_newer(damage, words, converted):
    path = converted / "k26jax_manifest.json"
    path.write_text(damage(path.read_text()))
    (fault,) = verify(converted).faults
    assert words in fault
    with pytest.raises(CheckpointError, match=words):
        load(converted)


def test_a_manifest_of_another_configuration(converted):
    """The tensors that config.json declares are looked for by name, whatever the manifest says."""
    path = converted / "k26jax_manifest.json"
    path.write_text(path.read_text().replace("experts.3.up_proj", "experts.33.up_proj"))
    with pytest.raises(CheckpointError, match=r"missing.*experts\.3\.up_proj"):
        load(converted)
    assert any("missing" in fault for fault in verify(converted).faults)
