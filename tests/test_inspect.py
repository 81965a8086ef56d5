"""`k26jax inspect` on golden, trained and damaged folders, against the safetensors library."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path

from fixtures.paths import REPOSITORY
from fixtures.shards import edit_header, split_file
from safetensors import safe_open

from k26jax.checkpoint.reader import Checkpoint
from k26jax.checkpoint.summary import summarize
from k26jax.cli import main

EXPERTS = "routed experts"


def model_folders(golden_dir: Path) -> list[Path]:
    folders = [path.parent for path in sorted(golden_dir.rglob("config.json"))]
    folders += [path.parent for path in sorted((REPOSITORY / "checkpoints").rglob("config.json"))]
    assert folders
    return folders


def inspected(folder: Path, capsys, code: int = 0) -> dict:
    assert main(["inspect", str(folder), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def library_counts(folder: Path) -> tuple[Counter, int, int]:
    """(bytes by dtype, weights, INT4 weights), of all tensors, counted by the library."""
    stored, weights, int4 = Counter(), 0, 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                part = file.get_slice(name)
                size, dtype = math.prod(part.get_shape()), part.get_dtype()
                stored[dtype] += size * {"BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8}.get(dtype, 4)
                if name.endswith("weight_shape"):
                    int4 += math.prod(file.get_tensor(name).tolist())
                elif not name.endswith(("weight_packed", "weight_scale", "_scale_inv")):
                    weights += size
    return stored, weights, int4


def test_weights_and_bytes_are_those_of_the_safetensors_library(golden_dir, capsys):
    for folder in model_folders(golden_dir):
        summary = inspected(folder, capsys)
        assert summary["fault"] is None, folder
        stored, weights, int4 = library_counts(folder)
        components = summary["components"]
        assert "other" not in components
        found = sum((Counter(c["bytes_by_dtype"]) for c in components.values()), Counter())
        assert sum(found.values()) == summary["file_bytes"]
        if not summary["skipped"]:
            assert found == stored
            assert sum(c["parameters"] for c in components.values()) == weights + int4
        else:
            assert found < stored
        if int4:
            assert components[EXPERTS]["parameters"] == int4


def test_components_have_the_sizes_of_the_configuration(golden_dir, capsys):
    for folder in model_folders(golden_dir):
        summary = inspected(folder, capsys)
        facts, parts = summary["facts"], summary["components"]
        config = json.loads((folder / "config.json").read_text())
        config = config.get("text_config", config)
        table = config["vocab_size"] * config["hidden_size"]
        if summary["kind"] == "drafter":
            features = len(facts["target layers read"]) * config["hidden_size"] ** 2
            assert parts["feature projection"]["parameters"] == features
            row = 2 * config["num_key_value_heads"] * config["head_dim"]
        else:
            assert parts["embedding"]["parameters"] == parts["head"]["parameters"] == table
            moe_layers = facts["layers"] - facts["dense layers"]
            one = 3 * config["hidden_size"] * config["moe_intermediate_size"]
            assert parts[EXPERTS]["parameters"] == moe_layers * config["n_routed_experts"] * one
            shared = moe_layers * config["n_shared_experts"] * one
            assert parts["shared experts"]["parameters"] == shared
            row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        assert facts["cache bytes a token (BF16)"] == 2 * row * config["num_hidden_layers"]


def test_nothing_but_int4_shapes_is_read(golden_dir, monkeypatch):
    names = []
    for call in ("read", "copy"):
        real = getattr(Checkpoint, call)
        monkeypatch.setattr(
            Checkpoint, call, lambda self, n, real=real: names.append(n) or real(self, n)
        )
    for folder in model_folders(golden_dir):
        assert summarize(folder).fault is None
    assert names
    assert all(name.endswith(".weight_shape") for name in names)


def test_the_table_shows_totals_end_tokens_and_tokenizer(small_pair, capsys):
    assert main(["inspect", str(small_pair.target)]) == 0
    out, err = capsys.readouterr()
    summary = summarize(small_pair.target)
    total = sum(component.parameters for component in summary.components.values())
    (all_line,) = [line for line in out.splitlines() if line.split()[:1] == ["all"]]
    assert all_line.split()[1:] == [f"{total:,}", f"{summary.file_bytes:,}"]
    eos = small_pair.config.eos_token_ids[0]
    assert f"{eos} <end{eos}>" in out
    ids = len(small_pair.letters) + len(small_pair.config.eos_token_ids)
    assert f"{ids} ids, {len(small_pair.config.eos_token_ids)} of them special" in out
    assert not err


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy(path, to)
    (to / "model.safetensors.index.json").unlink(missing_ok=True)
    return to


def shard(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def rename(header: dict, old: str, new: str) -> None:
    header[new] = header.pop(next(name for name in header if old in name))


def test_missing_and_leftover_tensors_are_named_and_the_rest_is_shown(small_pair, tmp_path, capsys):
    folder = copy(small_pair.target, tmp_path / "renamed")
    edit_header(shard(folder), lambda header: rename(header, "model.norm.", "model.nrom.weight"))
    summary = inspected(folder, capsys, code=3)
    assert "1 tensors are missing, first model.norm.weight" in summary["fault"]
    assert "1 tensors are not of this model, first model.nrom.weight" in summary["fault"]
    assert summary["facts"]["vocabulary"] == small_pair.config.vocab_size
    assert summary["components"]["embedding"]["parameters"] > 0
    assert main(["inspect", str(folder)]) == 3
    out, err = capsys.readouterr()
    assert "vocabulary" in out
    assert err.startswith("would not load: ")


def test_layers_past_the_last_are_counted_by_reason(small_pair, tmp_path, capsys):
    folder = copy(small_pair.target, tmp_path / "mtp")
    layers = small_pair.config.num_hidden_layers
    extra = f"model.layers.{layers}.input_layernorm.weight"

    def add(header: dict) -> None:
        header["z"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        header[extra] = header.pop("z")

    edit_header(shard(folder), add)
    summary = inspected(folder, capsys)
    assert summary["skipped"] == {f"layer {layers} of a model of {layers} layers": 1}


def test_every_other_fault_says_what_and_exits_with_3(small_pair, tmp_path, capsys):
    def cut(folder: Path) -> None:
        header, payload = split_file(shard(folder))
        shard(folder).write_bytes(len(header).to_bytes(8, "little") + header + payload[:-1])

    def retype(folder: Path) -> None:
        def change(header: dict) -> None:
            entry = header["lm_head.weight"]
            entry["shape"] = entry["shape"][::-1]

        edit_header(shard(folder), change)

    def edit_config(folder: Path, **values) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    faults = {
        "no_weights": (lambda folder: shard(folder).unlink(), "safetensors"),
        "cut": (cut, shard(small_pair.target).name),
        "turned": (retype, "lm_head.weight"),
        "no_config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
        "bad_config": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        "other": (lambda folder: edit_config(folder, model_type="llama"), "llama"),
        "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("[]"), "tokenizer"),
        "no_folder": (shutil.rmtree, "does not exist"),
    }
    for name, (damage, word) in faults.items():
        folder = copy(small_pair.target, tmp_path / name)
        damage(folder)
        summary = inspected(folder, capsys, code=3)
        assert word in summary["fault"], name
        has_config = name in ("no_weights", "cut", "turned", "tokenizer")
        assert (summary["kind"] == "target") == has_config
        assert bool(summary["facts"]) == has_config


def test_a_drafter_with_a_tensor_too_many_would_not_load(small_pair, tmp_path, capsys):
    folder = copy(small_pair.drafter, tmp_path / "drafter")
    edit_header(
        shard(folder),
        lambda header: header.update(bias={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    )
    summary = inspected(folder, capsys, code=3)
    assert summary["kind"] == "drafter"
    assert "not of this model, first bias" in summary["fault"]
