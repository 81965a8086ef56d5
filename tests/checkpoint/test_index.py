"""Every damaged folder is refused by a message that says what and where; whole ones are read."""

from __future__ import annotations

import json
import re
import struct
import tempfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors
from fixtures import shards
from fixtures.corrupt import DEFECTS
from fixtures.shards import FIRST, INDEX, SECOND

from k26jax.checkpoint.index import DTYPES, list_shards, read_header, read_index
from k26jax.errors import CheckpointError

IN_ONE_FILE = [name for name, defect in DEFECTS.items() if defect.file]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "a model, Größe 1"  # spaces and non-ASCII letters
    shards.write_valid(folder)
    return folder


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_refused(folder, name):
    DEFECTS[name].build(folder)
    with pytest.raises(CheckpointError) as caught:
        read_index(folder)
    message = str(caught.value)
    assert not [text for text in DEFECTS[name].mentions if text not in message], message
    assert re.search(r"[;:] [^;]*(download|give|keep|run|check)\b[^;]*$", message), message
    assert "\n" not in message
    assert str(folder) in message


@pytest.mark.parametrize("name", IN_ONE_FILE)
def test_damaged_file_is_damaged_by_the_published_reader_too(folder, name):
    """Guards the builders: a file that safetensors itself accepts would prove nothing."""
    DEFECTS[name].build(folder)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(folder / DEFECTS[name].file, framework="np").__enter__()


def test_valid_folder(folder):
    entries = read_index(folder)
    tensors = shards.write_valid(folder)
    assert entries.keys() == tensors.keys()
    for name, entry in entries.items():
        data = entry.file.read_bytes()[entry.begin : entry.end]
        assert entry.name == name
        assert entry.shape == tensors[name].shape
        assert DTYPES[entry.dtype] == tensors[name].dtype
        assert data == tensors[name].tobytes()
    places = [(entry.file, entry.begin) for entry in entries.values()]
    assert places == sorted(places)
    assert {file.name for file, _ in places} == {FIRST, SECOND}


def test_every_dtype_has_the_size_that_safetensors_says(tmp_path):
    for code, dtype in DTYPES.items():
        entry = {"dtype": code, "shape": [3], "data_offsets": [0, 3 * dtype.itemsize]}
        path = tmp_path / f"{code}.safetensors"
        shards.write_raw(path, {"x": entry}, bytes(3 * dtype.itemsize))
        assert read_header(path)[0].dtype == code
        with safetensors.safe_open(path, framework="np") as stored:
            assert stored.get_slice("x").get_dtype() == code


def test_order_in_the_header_need_not_be_that_of_the_bytes(folder):
    def turn(header):
        for name in list(header)[::-1]:
            header[name] = header.pop(name)

    before = read_index(folder)
    shards.edit_header(folder / FIRST, turn)
    assert list(read_index(folder)) == list(before)


def test_files_that_the_index_does_not_mention_are_ignored(folder):
    tensors = shards.valid_tensors()[FIRST]
    shards.write_shard(folder / "model.safetensors", {k: v + 1 for k, v in tensors.items()})
    (folder / "consolidated.safetensors").write_bytes(b"broken")
    assert list_shards(folder).ignored == ("consolidated.safetensors", "model.safetensors")
    assert {entry.file.name for entry in read_index(folder).values()} == {FIRST, SECOND}


@pytest.mark.parametrize("name", ["model.safetensors", "a.safetensors", "m-1-of-00001.safetensors"])
def test_one_file_needs_no_index(folder, tmp_path, name):
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / FIRST).rename(alone / name)
    (alone / "._model.safetensors").write_bytes(b"left by another system")
    assert list(read_index(alone)) == list(shards.valid_tensors()[FIRST])
    assert list_shards(alone).weight_map is None


def test_shards_may_be_links_to_elsewhere(folder, tmp_path):
    """The cache of the model hub is a folder of links."""
    blob = tmp_path / "blob"
    (folder / FIRST).rename(blob)
    (folder / FIRST).symlink_to(blob)
    assert read_index(folder)[shards.EMBED].file == folder / FIRST


def test_file_that_cannot_be_opened(folder, monkeypatch):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(CheckpointError, match=f"{FIRST} cannot be read .Permission denied"):
        read_header(folder / FIRST)


def test_every_shorter_file_is_refused(folder):
    data = (folder / FIRST).read_bytes()
    for length in range(len(data)):
        (folder / FIRST).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=f"{FIRST} is truncated"):
            read_index(folder)


@hypothesis.settings(max_examples=150)
@hypothesis.given(data=st.data())
def test_random_damage_is_refused_or_harmless(data):
    """What we accept, safetensors accepts with the same tensors; nothing else than our error."""
    with tempfile.TemporaryDirectory() as folder:
        shards.write_valid(Path(folder))
        path = Path(folder) / FIRST
        raw = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", raw[:8])
        for _ in range(data.draw(st.integers(1, 3))):
            # Digits and punctuation do more than random bytes, which rarely leave JSON behind.
            byte = data.draw(st.sampled_from(b'0123456789,:"[]{} FIB') | st.integers(0, 255))
            raw[data.draw(st.integers(0, 7 + length))] = byte
        path.write_bytes(raw)
        try:
            entries = read_header(path)
        except CheckpointError as error:
            assert FIRST in str(error)  # noqa: PT017
            return
        with safetensors.safe_open(path, framework="np") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        assert {entry.name: entry.shape for entry in entries} == shapes


def test_golden_folders(golden_dir):
    folders = {path.parent for path in golden_dir.rglob("*.safetensors")}
    assert folders
    for folder in folders:
        expected = {}
        for path in folder.glob("*.safetensors"):
            with safetensors.safe_open(path, framework="np") as stored:
                for name in stored.keys():  # noqa: SIM118
                    piece = stored.get_slice(name)
                    expected[name] = (path, piece.get_dtype(), tuple(piece.get_shape()))
        found = read_index(folder)
        assert {n: (e.file, e.dtype, e.shape) for n, e in found.items()} == expected
        if (folder / INDEX).exists():
            total = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
            assert sum(entry.size_bytes for entry in found.values()) == total


def test_entry_is_frozen(folder):
    entry = read_index(folder)[shards.EMBED]
    assert entry.size_bytes == int(np.prod(entry.shape)) * 2
    with pytest.raises(AttributeError):
        entry.begin = 0
