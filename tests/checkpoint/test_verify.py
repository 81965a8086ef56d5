"""verify, load and convert against damaged published folders; numbers of the bug log, section F."""

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fixtures.converted import (
    PREFIX,
    convert_folder,
    copy_model,
    int4_golden,
    load,
    rewrite,
    shard_of,
    value,
)
from fixtures.shards import edit_header, edit_weight_map, split_file, write_raw, write_shard
from safetensors.numpy import load_file

from k26jax.checkpoint.convert import plan_conversion
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.checkpoint.verify import verify
from k26jax.errors import CheckpointError, ConfigError

NORM = "model.layers.1.input_layernorm.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
EXPERT = "model.layers.2.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def golden(golden_dir, tmp_path_factory):
    """An INT4 model, published and converted; never changed."""
    source = copy_model(int4_golden(golden_dir), tmp_path_factory.mktemp("golden") / "source")
    return source, convert_folder(source, source.parent / "converted")


@pytest.fixture
def source(golden, tmp_path):
    return Path(shutil.copytree(golden[0], tmp_path / "source"))


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


def test_110_a_shard_name_that_leads_out_of_the_folder(source):
    edit_weight_map(
        source, lambda weight_map: weight_map.update({PREFIX + NORM: "../a.safetensors"})
    )
    refused(source, "../a.safetensors", "without a path")
