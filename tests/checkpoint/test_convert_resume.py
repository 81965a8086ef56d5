"""A conversion that is killed, refused a disk, or met by another one; folders it must not touch.

Numbers are those of the log of public bug reports (section F).
"""

import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from fixtures.converted import convert_folder, copy_model, int4_golden, load
from fixtures.paths import REPOSITORY

from k26jax.checkpoint import manifest as manifest_module
from k26jax.checkpoint import trees
from k26jax.checkpoint.convert import ConvertOptions, convert, plan_conversion
from k26jax.checkpoint.export import export, plan_export
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.checkpoint.verify import verify
from k26jax.checkpoint.workspace import JOURNAL, partial_folder
from k26jax.errors import CapacityError, CheckpointError

MANIFEST = "k26jax_manifest.json"
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def source(golden_dir, tmp_path_factory):
    return copy_model(int4_golden(golden_dir), tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def whole(source):
    """The manifest of an uninterrupted conversion."""
    return (convert_folder(source, source.parent / "whole") / MANIFEST).read_bytes()


def start(*arguments, limit_bytes: int = resource.RLIM_INFINITY) -> subprocess.Popen:
    """Starts the command with a limit on the size of any file it writes."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); "
        "from k26jax.cli import main; sys.exit(main(['convert', *sys.argv[2:]]))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(limit_bytes), *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def stop_after(monkeypatch, count: int) -> None:
    """Makes the conversion fail when it has written `count` trees."""
    saved = []
    save = trees.save_tree

    def save_some(folder, tree):
        if len(saved) == count:
            raise KeyboardInterrupt
        saved.append(folder)
        save(folder, tree)

    monkeypatch.setattr("k26jax.checkpoint.convert.save_tree", save_some)


def kill_at_random(arguments, partial: Path, moments: random.Random, longest: float) -> int:
    """Kills a conversion some time after it has begun to write; returns its exit code."""
    journal = partial / JOURNAL

    def inode() -> int | None:
        return journal.stat().st_ino if journal.exists() else None

    before = inode()
    process = start(*arguments)
    # A run that resumes writes the journal anew.
    while process.poll() is None and inode() == before:
        time.sleep(0.002)
    time.sleep(moments.uniform(0, longest))
    process.kill()
    return finish(process)[0]


@pytest.mark.parametrize(
    "kills", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_101_a_killed_conversion_resumes_to_the_same_folder(kills, source, whole, tmp_path):
    target, moments = tmp_path / "target", random.Random(101)
    partial, codes, depths = partial_folder(target), [], []
    for _ in range(kills):
        shutil.rmtree(target, ignore_errors=True)
        codes.append(kill_at_random([source, target, "--resume"], partial, moments, 0.6))
        if not (target / MANIFEST).exists():
            with pytest.raises(CheckpointError, match="unfinished"):
                open_checkpoint(partial)
            depths.append(len((partial / JOURNAL).read_text().splitlines()))
    assert KILLED in codes
    assert kills == 2 or len(set(depths)) >= 3  # the kills came at different depths
    code, errors = finish(start(source, target, "--resume"))
    assert code == 0, errors
    assert (target / MANIFEST).read_bytes() == whole
    assert not verify(target, source).faults
    assert not partial.exists()


@pytest.mark.slow
def test_101_a_killed_export_resumes_to_the_same_files(source, tmp_path):
    converted = convert_folder(source, tmp_path / "converted")
    export(plan_export(converted, tmp_path / "whole"))
    target, moments = tmp_path / "target", random.Random(7)
    for _ in range(5):
        shutil.rmtree(target, ignore_errors=True)
        arguments = [converted, target, "--to-hf", "--resume"]
        kill_at_random(arguments, partial_folder(target), moments, 0.2)
    assert finish(start(converted, target, "--to-hf", "--resume"))[0] == 0
    for path in (tmp_path / "whole").iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()


def test_101_finished_trees_are_kept_and_half_ones_are_not(source, whole, tmp_path, monkeypatch):
    target = tmp_path / "target"
    partial = partial_folder(target)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            convert_folder(source, target)
    kept = (partial / "layer_00001" / "manifest.ocdbt").stat()
    half = partial / "layer_00002"
    shutil.copytree(partial / "layer_00001", half)  # a tree without a line in the journal
    (partial / "layer_00003.orbax-checkpoint-tmp").mkdir()
    with open(partial / JOURNAL, "ab") as stream:
        stream.write(b'{"unit": "layer_00002", "rec')  # the line that the kill cut
    with pytest.raises(CheckpointError, match=r"2 finished parts.*--resume"):
        convert_folder(source, target)
    written = []
    convert(plan_conversion(source, target), resume=True, on_tree=written.append)
    assert written == ["layer_00002", "layer_00003", "outside_layers"]
    assert (target / "layer_00001" / "manifest.ocdbt").stat().st_ino == kept.st_ino
    assert (target / MANIFEST).read_bytes() == whole
    assert sorted(p.name for p in target.iterdir() if "tmp" in p.name) == []
    # Once more changes nothing and is no error.
    assert convert(plan_conversion(source, target), resume=True).trees


def test_101_a_kill_after_the_rename_leaves_a_finished_folder(source, tmp_path, monkeypatch):
    target = tmp_path / "target"
    rename = os.rename

    def rename_and_stop(old, new):
        rename(old, new)
        if Path(new) == target:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", rename_and_stop)
    with pytest.raises(KeyboardInterrupt):
        convert_folder(source, target)
    monkeypatch.undo()
    assert not verify(target).faults
    assert convert(plan_conversion(source, target), resume=True).trees


@pytest.mark.parametrize("change", ["options", "layers", "weights", "config"])
def test_102_work_for_another_request_is_not_resumed(change, source, tmp_path, monkeypatch):
    copy, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(source, copy)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            convert_folder(copy, target)
    options = ConvertOptions()
    if change == "options":
        options, words = ConvertOptions(dtype="float32"), ("options dtype", "'auto'", "'float32'")
    elif change == "layers":
        # They change config.json too, whose hash would say nothing to anybody.
        options, words = ConvertOptions(layers=2), ("options layers", "None then, 2 now")
    elif change == "config":
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config))
        words = ("files config.json",)
    else:
        # Another model of the same shapes: equal header, equal size, other values.
        path = sorted(copy.glob("*.safetensors"))[0]
        data = bytearray(path.read_bytes())
        data[-40_000:] = bytes(byte ^ 1 for byte in data[-40_000:])
        path.write_bytes(data)
        words = (f"source {path.name}",)
    with pytest.raises(CheckpointError) as caught:
        convert(plan_conversion(copy, target, options), resume=True)
    for word in words:
        assert word in str(caught.value)


def test_103_free_disk_is_checked_before_anything_is_written(source, tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=30_000_000))
    target = tmp_path / "target"
    with pytest.raises(CapacityError, match="30,000,000 are free"):
        convert_folder(source, target)
    assert not list(partial_folder(target).glob("layer*"))
    with pytest.raises(CapacityError, match="30,000,000 are free"):
        export(plan_export(convert_with_room(source, tmp_path, monkeypatch), tmp_path / "back"))


def convert_with_room(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.undo()
        return convert_folder(source, tmp_path / "roomy")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 MB; skips where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_103_a_full_file_system_is_named_and_the_work_goes_on_later(source, whole, small_disk):
    target, filler = small_disk / "target", small_disk / "filler"
    plan = plan_conversion(source, target)
    left = []

    def fill(size: int) -> None:
        # The check at the start saw the room; then another program takes it.
        if not left:
            left.append(size)
            room = shutil.disk_usage(small_disk).free
            filler.write_bytes(bytes(room - 150_000))

    with pytest.raises(CapacityError, match=r"is full.*--resume"):
        convert(plan, progress=fill)
    assert not target.exists()
    filler.unlink()
    convert(plan_conversion(source, target), resume=True)
    assert (target / MANIFEST).read_bytes() == whole


def test_103_a_write_that_the_system_refuses(source, whole, tmp_path):
    """A limit on file sizes fails the write call itself, without any privilege."""
    target = tmp_path / "target"
    code, errors = finish(start(source, target, limit_bytes=60_000))
    assert code == CapacityError.exit_code, errors
    assert f"the disk of {target} is full" in errors
    assert "--resume" in errors
    code, errors = finish(start(source, target, "--resume"))
    assert code == 0, errors
    assert (target / MANIFEST).read_bytes() == whole


@pytest.mark.parametrize("call", ["replace", "rename", "fsync"])
def test_103_a_full_disk_at_any_call(call, source, whole, tmp_path, monkeypatch):
    target, real = tmp_path / "target", getattr(os, call)

    def refuse(*args, **kwargs):
        if "target.partial" in str(args[0]) or call == "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(CapacityError, match="is full"):
            convert_folder(source, target)
    assert not target.exists()
    convert(plan_conversion(source, target), resume=True)
    assert (target / MANIFEST).read_bytes() == whole


def test_110_two_converters_on_one_target(source, tmp_path):
    target = tmp_path / "target"
    partial = partial_folder(target)
    partial.mkdir()
    with open(partial / "k26jax_lock", "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        code, errors = finish(start(source, target, "--resume"))
    assert code == CheckpointError.exit_code
    assert "another process is making" in errors
    assert str(target) in errors
    assert sorted(path.name for path in partial.iterdir()) == ["k26jax_lock"]
    # The lock goes with its holder, so nothing has to be removed by hand.
    assert finish(start(source, target, "--resume"))[0] == 0


def test_110_folders_that_must_not_be_written(source, tmp_path, monkeypatch):
    def refused(target, words):
        with pytest.raises(CheckpointError, match=words):
            convert_folder(source, target)

    before = sorted((p.name, p.stat().st_mtime_ns) for p in source.iterdir())
    refused(source, "itself")
    refused(source / "inside", "lies in it")
    refused(source.parent, "holds it")
    link = tmp_path / "link"
    link.symlink_to(source)
    refused(link, "itself")
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "notes.txt").write_text("keep")
    refused(busy, "not empty")
    assert (busy / "notes.txt").read_text() == "keep"
    refused(busy / "notes.txt", "no folder")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refused(loop, "no folder")
    assert before == sorted((p.name, p.stat().st_mtime_ns) for p in source.iterdir())
    mkdir = Path.mkdir

    def read_only(self, *args, **kwargs):
        if self.name == "new.partial":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", read_only)
    refused(tmp_path / "new", "cannot be written.*Read-only file system")


def test_110_a_path_that_is_not_utf8(source, tmp_path):
    with pytest.raises(CheckpointError, match="not UTF-8"):
        convert_folder(source, tmp_path / os.fsdecode(b"b\xffad"))
    assert list(tmp_path.iterdir()) == []


def test_110_a_read_only_file_system(source, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"cannot be written.*Read-only"):
        convert_folder(source, small_disk / "target")


def test_110_names_with_spaces_and_letters_of_other_scripts(source, tmp_path):
    folder = tmp_path / "модель 模型 #1%20"
    shutil.copytree(source, folder / "a b")
    converted = convert_folder(folder / "a b", folder / "c d?e")
    assert not verify(converted).faults
    jax.tree.map(np.testing.assert_array_equal, load(converted), load(source))
    export(plan_export(converted, folder / "back"))
    assert not verify(folder / "back").faults


def test_an_unfinished_folder_says_what_it_is(source, tmp_path, monkeypatch):
    target = tmp_path / "target"
    stop_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        convert_folder(source, target)
    with pytest.raises(CheckpointError, match=r"unfinished conversion.*--resume"):
        open_checkpoint(partial_folder(target))
    assert manifest_module.VERSION == 1
