"""Opened checkpoints hold the right tensors under canonical names and read them only on demand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors
from fixtures import shards
from fixtures.corrupt import DEFECTS
from fixtures.shards import BIAS, EMBED, FIRST, NORM, SECOND

from k26jax.checkpoint.index import DTYPES, read_index
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.errors import CheckpointError

VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shards.write_valid(folder)
    return folder


@pytest.fixture
def count_maps(monkeypatch) -> list[str]:
    """The files mapped so far, by name."""
    mapped = []
    real = np.memmap

    class Counting(real):
        def __new__(cls, file, *args, **kwargs):
            mapped.append(Path(file).name)
            return real.__new__(cls, file, *args, **kwargs)

    monkeypatch.setattr(np, "memmap", Counting)
    return mapped


def write_single(folder: Path, *names: str) -> Path:
    """Writes a file with one vector of float32 a name: the n-th is filled with n."""
    folder.mkdir(parents=True)
    tensors = {name: np.full(3, i, np.float32) for i, name in enumerate(names)}
    shards.write_shard(folder / "model.safetensors", tensors)
    return folder


def golden_folders(golden_dir: Path) -> list[Path]:
    folders = sorted({path.parent for path in golden_dir.rglob("*.safetensors")})
    assert folders
    return folders


def published_bytes(path: Path) -> dict[str, bytes]:
    """Every tensor of a file as the safetensors library slices it, undecoded."""
    stored = safetensors.deserialize(path.read_bytes())
    return {name: bytes(entry["data"]) for name, entry in stored}


def test_golden_values(golden_dir):
    kinds = set()
    for folder in golden_folders(golden_dir):
        published = {}
        for path in folder.glob("*.safetensors"):
            published |= published_bytes(path)
        with open_checkpoint(folder) as checkpoint:
            assert checkpoint.names()
            for name in checkpoint.names():
                entry, value = checkpoint.entry(name), checkpoint.read(name)
                assert value.shape == entry.shape
                assert value.dtype == DTYPES[entry.dtype]
                assert value.tobytes() == published[entry.name]
                kinds.add(entry.dtype)
            assert {e.name for e in checkpoint.entries.values()} | set(checkpoint.skipped) == set(
                published
            )
    assert "F32" in kinds


def test_golden_float_values_equal_numpy_reading(golden_dir):
    """Numbers, not bytes: BF16 is widened by hand, so a wrong dtype cannot hide."""
    compared = 0
    for folder in golden_folders(golden_dir):
        with open_checkpoint(folder) as checkpoint:
            for name in checkpoint.names()[::5]:
                entry = checkpoint.entry(name)
                data = entry.file.read_bytes()[entry.begin : entry.end]
                if entry.dtype == "BF16":
                    words = np.frombuffer(data, "<u2").astype(np.uint32) << 16
                    expected = words.view(np.float32)
                elif entry.dtype == "F32":
                    expected = np.frombuffer(data, "<f4")
                else:
                    continue
                found = checkpoint.read(name).astype(np.float32)
                np.testing.assert_array_equal(found, expected.reshape(entry.shape))
                compared += 1
    assert compared


def test_golden_prefix_and_skip_rules(golden_dir):
    for folder in golden_folders(golden_dir):
        originals = list(read_index(folder))
        skipped = [n for n in originals if n.startswith(VISION) or n.endswith(".inv_freq")]
        text = [name for name in originals if name not in skipped]
        checkpoint = open_checkpoint(folder)
        assert checkpoint.names() == [name.removeprefix("language_model.") for name in text]
        assert list(checkpoint.skipped) == skipped
        assert not [name for name in checkpoint.names() if "language_model" in name]


def test_golden_layers_beyond_the_count_are_skipped(golden_dir):
    for folder in golden_folders(golden_dir):
        everything = open_checkpoint(folder)
        beyond = {
            name
            for name in everything.names()
            if name.startswith("model.layers.") and int(name.split(".")[2]) >= 1
        }
        fewer = open_checkpoint(folder, num_hidden_layers=1)
        assert set(fewer.names()) == set(everything.names()) - beyond
        removed = {name.removeprefix("language_model.") for name in fewer.skipped}
        assert beyond <= removed
        assert fewer.total_bytes() == sum(fewer.read(name).nbytes for name in fewer.names())


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_skip_rules(tmp_path, prefix):
    text = [
        f"{prefix}model.layers.9.mlp.gate.weight",
        f"{prefix}model.layers.1.rotary_emb.inv_frequency",
        f"{prefix}lm_head.weight",
        "other_rotary_emb.inv_freq",
        "layers.12.norm.weight",
        "fc.weight",
    ]
    skipped = {
        f"{prefix}model.layers.10.input_layernorm.weight": "layer 10 of a model of 10 layers",
        f"{prefix}model.layers.011.eh_proj.weight": "layer 11 of a model of 10 layers",
        f"{prefix}model.layers.0.self_attn.rotary_emb.inv_freq": "frequencies",
        "rotary_emb.inv_freq": "frequencies",
        "vision_tower.blocks.0.weight": "vision",
        "mm_projector.proj.0.weight": "vision",
        "multi_modal_projector.weight": "vision",
    }
    folder = write_single(tmp_path / "m", *text, *skipped)
    checkpoint = open_checkpoint(folder, num_hidden_layers=10)
    assert checkpoint.names() == [name.removeprefix(prefix) for name in text]
    assert checkpoint.skipped.keys() == skipped.keys()
    for name, reason in skipped.items():
        assert reason in checkpoint.skipped[name]
    for i, name in enumerate(checkpoint.names()):
        assert checkpoint.read(name).tolist() == [i, i, i]
    with pytest.raises(CheckpointError, match=r"skipped: layer 10 of a model"):
        checkpoint.read("model.layers.10.input_layernorm.weight")


def test_names_that_collide_without_the_prefix(tmp_path):
    folder = write_single(tmp_path / "m", "model.norm.weight", "language_model.model.norm.weight")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "'model.norm.weight'" in str(caught.value)
    assert "'language_model.model.norm.weight'" in str(caught.value)


def test_skipped_tensors_do_not_collide(tmp_path):
    name = "model.layers.3.norm.weight"
    folder = write_single(tmp_path / "m", "fc.weight", name, f"language_model.{name}")
    checkpoint = open_checkpoint(folder, num_hidden_layers=3)
    assert checkpoint.names() == ["fc.weight"]
    assert len(checkpoint.skipped) == 2


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_refused_on_opening(folder, name):
    DEFECTS[name].build(folder)
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)


def test_every_dtype_unaligned(tmp_path):
    """A first tensor of one byte puts all others at odd offsets."""
    tensors = {"odd": np.array([-1], np.int8)}
    assert DTYPES.keys() == set(shards.CODES.values())
    for dtype, code in shards.CODES.items():
        value = np.array([0, 1, 1, 0, 1, 1] if code == "BOOL" else [0, 1, 2, 3, 96, 7])
        tensors[code] = value.astype(dtype).reshape(2, 3)
    (tmp_path / "m").mkdir()
    shards.write_shard(tmp_path / "m" / "model.safetensors", tensors)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.entry("F64").begin % 2
    for name, value in tensors.items():
        found = checkpoint.read(name)
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found.astype(np.float64), value.astype(np.float64))
        np.testing.assert_array_equal(found[..., ::-1].copy(), value[..., ::-1])
        assert found.tobytes() == value.tobytes()


def test_read_gives_views_of_the_file(folder, count_maps):
    tensors = shards.write_valid(folder)
    checkpoint = open_checkpoint(folder)
    assert count_maps == []
    for _ in range(2):
        for name, value in tensors.items():
            found = checkpoint.read(name)
            assert type(found) is np.ndarray
            assert not found.flags.writeable
            assert not found.flags.owndata
            assert found.shape == value.shape
            np.testing.assert_array_equal(found, value)
    assert count_maps == [FIRST, SECOND]
    assert np.shares_memory(checkpoint.read(BIAS), checkpoint.read(BIAS))
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.read(BIAS)[0] = 1
    assert checkpoint.total_bytes() == sum(value.nbytes for value in tensors.values())


def test_huge_file_opens_without_reading_it(tmp_path, count_maps):
    """64 GiB, nearly all a hole in the file: reading it takes at least ten seconds."""
    size = 2**36
    header = {
        "huge": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "last": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]},
    }
    (tmp_path / "m").mkdir()
    path = tmp_path / "m" / "model.safetensors"
    shards.write_raw(path, header, b"")
    begin = path.stat().st_size
    with open(path, "r+b") as stream:
        stream.seek(begin + size)
        stream.write(np.array([1.5, -2], np.float32).tobytes())
    if path.stat().st_blocks * 512 > 2**24:
        pytest.skip("the file system stores holes")
    start = time.perf_counter()
    checkpoint = open_checkpoint(tmp_path / "m")
    assert count_maps == []
    assert checkpoint.total_bytes() == size + 8
    assert checkpoint.read("last").tolist() == [1.5, -2]
    assert checkpoint.read("huge")[:: size // 4].tolist() == [0, 0, 0, 0]
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("change", [-1, 1])
def test_file_that_changes_its_size(folder, is_mapped, change):
    checkpoint = open_checkpoint(folder)
    if is_mapped:
        checkpoint.read(EMBED)
    size = (folder / FIRST).stat().st_size
    os.truncate(folder / FIRST, size + change)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(EMBED)
    for text in (FIRST, f"had {size} bytes", f"has {size + change} now"):
        assert text in str(caught.value)
    assert checkpoint.read(NORM).shape == (4,)
    os.truncate(folder / FIRST, size)
    assert checkpoint.read(EMBED).shape == (6, 4)


def test_file_that_disappears(folder):
    checkpoint = open_checkpoint(folder)
    (folder / FIRST).unlink()
    with pytest.raises(CheckpointError, match=f"{FIRST} cannot be read any more"):
        checkpoint.read(EMBED)


def test_view_outlives_close(folder):
    with open_checkpoint(folder) as checkpoint:
        value = checkpoint.read(BIAS)
    expected = shards.valid_tensors()[FIRST][BIAS]
    np.testing.assert_array_equal(value, expected)
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.read(BIAS)


def test_unknown_name_gets_the_nearest(folder):
    checkpoint = open_checkpoint(folder)
    assert EMBED in checkpoint
    assert "model.embed_token.weight" not in checkpoint
    for call in (checkpoint.entry, checkpoint.read):
        with pytest.raises(CheckpointError, match=f"did you mean '{EMBED}'"):
            call("model.embed_token.weight")
    with pytest.raises(CheckpointError, match=r"has no tensor 'zzz'$"):
        checkpoint.entry("zzz")


def test_nearest_name_keeps_the_layer(tmp_path):
    names = [f"model.layers.{i}.self_attn.q_a_proj.weight" for i in range(30)]
    checkpoint = open_checkpoint(write_single(tmp_path / "m", *names))
    with pytest.raises(CheckpointError, match=r"mean 'model.layers.17.self_attn.q_a_proj.weight'"):
        checkpoint.entry("model.layers.17.self_attn.q_proj.weight")


def test_ignored_files_are_reported(folder):
    assert open_checkpoint(folder).ignored_files == ()
    (folder / "old.safetensors").write_bytes(b"")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.ignored_files == ("old.safetensors",)
    assert checkpoint.folder == folder


def test_reading_needs_neither_jax_nor_torch():
    code = (
        "import json, sys\n"
        "import k26jax.checkpoint.fp8, k26jax.checkpoint.int4, k26jax.checkpoint.reader\n"
        "print(json.dumps([m for m in ('jax', 'torch', 'safetensors') if m in sys.modules]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []
