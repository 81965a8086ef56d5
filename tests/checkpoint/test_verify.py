"""verify, load and convert against every fault of section F of the log of public bug reports."""

import json
import os
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from fixtures.converted import (
    convert_folder,
    copy_model,
    data_files,
    flip_bit,
    int4_golden,
    load,
)
from fixtures.paths import REPOSITORY
from fixtures.shards import edit_header, edit_weight_map, split_file, write_raw, write_shard
from safetensors.numpy import load_file

from k26jax.checkpoint.convert import plan_conversion
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.checkpoint.verify import verify
from k26jax.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
PREFIX = "language_model."
NORM = "model.layers.1.input_layernorm.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
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


def refused(folder: Path, *words) -> None:
    """Loading, verifying and converting a published folder all name the fault."""
    messages = ["; ".join(verify(folder).faults)]
    for use in (load, lambda folder: plan_conversion(folder, folder.parent / "x")):
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            use(folder)
        messages.append(str(caught.value))
    for message in messages:
        for word in words:
            assert word in message


def shard_of(folder: Path, name: str) -> Path:
    """The file of a tensor given by its canonical name."""
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][PREFIX + name]


def rewrite(folder: Path, changes) -> None:
    """Replaces tensors (canonical names) by other values, or removes them where None."""
    for name, value in changes.items():
        path = shard_of(folder, name)
        tensors = load_file(path)
        if value is None:
            del tensors[PREFIX + name]
            edit_weight_map(folder, lambda weight_map, n=name: weight_map.pop(PREFIX + n))
        else:
            tensors[PREFIX + name] = value
        write_shard(path, tensors)


def value(folder: Path, name: str) -> np.ndarray:
    return load_file(shard_of(folder, name))[PREFIX + name]


# Published folders.


@pytest.mark.parametrize("cut", ["one byte", "half", "in the header", "all", "to seven bytes"])
def test_89_a_shard_shorter_than_its_header_says(cut, source):
    path = shard_of(source, NORM)
    header, payload = split_file(path)
    size = path.stat().st_size
    left = {
        "one byte": size - 1,
        "half": 8 + len(header) + len(payload) // 2,
        "in the header": 8 + len(header) // 2,
        "all": 0,
        "to seven bytes": 7,
    }[cut]
    os.truncate(path, left)
    refused(source, path.name, "truncated")
    if cut in ("one byte", "half"):
        refused(source, f"it has {left} bytes, expected {size}")


def test_89_a_shard_that_shrinks_after_it_was_opened(source):
    path = shard_of(source, NORM)
    with open_checkpoint(source) as checkpoint:
        size = path.stat().st_size
        os.truncate(path, size - 1)
        with pytest.raises(CheckpointError, match=f"had {size} bytes .* and has {size - 1} now"):
            checkpoint.copy(BIAS)


@pytest.mark.parametrize("length", [0, 2**63, 100_000_001])
def test_90_a_header_of_an_impossible_length(length, source):
    path = shard_of(source, NORM)
    data = path.read_bytes()
    path.write_bytes(length.to_bytes(8, "little") + data[8:])
    refused(source, path.name, f"{length} bytes")


@pytest.mark.parametrize("text", [b"{'a': 1}", b'{"\xff": {}}', b"[]", b"\0" * 64])
def test_90_a_header_that_is_no_json_object(text, source):
    path = shard_of(source, NORM)
    write_raw(path, text, split_file(path)[1])
    refused(source, path.name, "header")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("data_offsets", lambda entry: [entry[0] - 2, entry[1] - 2]),
        ("data_offsets", lambda entry: [entry[1], entry[0]]),
        ("data_offsets", lambda entry: [entry[0] + 2**40, entry[1] + 2**40]),
        ("data_offsets", lambda entry: [entry[0], entry[1] - 2]),
        ("shape", lambda shape: [-shape[0], -1]),
        ("shape", lambda shape: [2**62, 4]),
        ("dtype", lambda dtype: "F33"),
    ],
)
def test_91_offsets_shapes_and_dtypes_that_do_not_fit(field, change, source):
    path = shard_of(source, NORM)
    edit_header(
        path,
        lambda header: header[PREFIX + NORM].update({field: change(header[PREFIX + NORM][field])}),
    )
    refused(source, path.name, PREFIX)


def test_93_a_pointer_in_place_of_a_shard(source):
    path = shard_of(source, NORM)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    refused(source, path.name, "git-LFS pointer", "git lfs pull")


def test_94_a_stale_extra_shard_is_not_read_and_verify_says_so(golden, source):
    stale = {PREFIX + NORM: np.full_like(value(source, NORM), 7)}
    write_shard(source / "model-00003-of-00003.safetensors", stale)
    np.testing.assert_array_equal(
        load(source)["input_layernorm"], load(golden[0])["input_layernorm"]
    )
    (fault,) = verify(source).faults
    assert "model-00003-of-00003.safetensors" in fault
    assert "index does not mention" in fault
    assert not verify(golden[0]).faults


@pytest.mark.parametrize("change", [0, 1])
def test_95_one_tensor_in_two_shards(change, source):
    first, other = shard_of(source, NORM), None
    other = next(p for p in source.glob("*.safetensors") if p != first)
    copy = value(source, NORM) + np.asarray(change, ml_dtypes.bfloat16)
    write_shard(other, load_file(other) | {PREFIX + NORM: copy})
    refused(source, NORM, first.name, other.name, "two files")


def test_95_one_name_twice_in_a_header(source):
    path = shard_of(source, NORM)
    header, payload = split_file(path)
    entry = json.dumps({PREFIX + NORM: json.loads(header)[PREFIX + NORM]}).encode()
    write_raw(path, header.rstrip()[:-1] + b", " + entry[1:], payload)
    refused(source, path.name, NORM, "twice")


@pytest.mark.parametrize("name", [NORM, BIAS, f"{EXPERT}.weight_scale"])
def test_97_a_tensor_that_is_missing(name, source):
    rewrite(source, {name: None})
    refused(source, name)


def test_98_an_expert_that_is_missing_and_a_tensor_that_does_not_belong(source):
    parts = [f"{EXPERT}.weight_{part}" for part in ("packed", "scale", "shape")]
    rewrite(source, dict.fromkeys(parts))
    refused(source, "missing", f"{EXPERT}.weight_packed")
    rewrite_extra(source, "model.layers.1.self_attn.extra.weight")
    refused(source, "not of this model", "self_attn.extra")


def rewrite_extra(folder: Path, name: str) -> None:
    path = shard_of(folder, NORM)
    tensors = load_file(path) | {PREFIX + name: np.zeros(2, np.float32)}
    write_shard(path, tensors)
    edit_weight_map(folder, lambda weight_map: weight_map.update({PREFIX + name: path.name}))


@pytest.mark.parametrize(
    ("name", "bad"), [(NORM, np.nan), (f"{EXPERT}.weight_scale", np.inf), (BIAS, -np.inf)]
)
def test_99_nan_and_infinity(name, bad, source):
    values = value(source, name)
    values.flat[1] = bad
    rewrite(source, {name: values})
    words = f"tensor {name!r} holds 1 values that are NaN or infinite"
    assert any(words in fault for fault in verify(source).faults)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        load(source)
    # A converted folder is checked for values too, not only for hashes.
    converted = convert_folder(source, source.parent / "bad")
    assert any(words in fault for fault in verify(converted).faults)


def test_99_a_scale_of_zero_over_values_that_are_not_zero(source, golden):
    name = f"{EXPERT}.weight_scale"
    scale = value(source, name)
    scale[0, 0] = 0
    rewrite(source, {name: scale})
    (fault,) = verify(source).faults
    assert f"tensor {name!r} has 1 scales of zero" in fault
    packed = value(source, f"{EXPERT}.weight_packed")
    packed[0, :4] = np.uint32(0x88888888).astype(np.int32)  # four words of zeros: one group
    rewrite(source, {f"{EXPERT}.weight_packed": packed})
    assert not verify(source).faults


def test_99_subnormal_numbers_are_numbers(source):
    values = value(source, NORM)
    values.flat[0] = np.float32(1e-39)
    assert values.flat[0] != 0
    rewrite(source, {NORM: values})
    assert not verify(source).faults


# Converted folders.


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
    expected, rng, seen = load(golden[1]), np.random.default_rng(8), 0
    for _ in range(16):
        path = rng.choice(sorted(data_files(converted / "layer_00002")))
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        if verify(converted).faults:
            seen += 1
        else:
            jax.tree.map(np.testing.assert_array_equal, load(converted), expected)
        path.write_bytes(data)
    assert seen >= 3


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


def test_110_a_shard_name_that_leads_out_of_the_folder(source):
    edit_weight_map(
        source, lambda weight_map: weight_map.update({PREFIX + NORM: "../a.safetensors"})
    )
    refused(source, "../a.safetensors", "without a path")


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
