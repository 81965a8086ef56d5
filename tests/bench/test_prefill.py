"""`k26jax bench prefill`: the chunks it runs, what it counts and prints; its times need a GPU."""

import json

import pytest
from fixtures.pairs import tiny_configs

from k26jax.bench import prefill, timing
from k26jax.bench.prefill import PrefillJob, PrefillRow
from k26jax.cli import main
from k26jax.engine import runner

ROW = PrefillRow(256, 4096, 0.05, 4 * 10**12, 3 * 10**12, 10**12)


def test_chunks_behind_contexts_run(monkeypatch):
    monkeypatch.setattr(prefill, "_REPEATS", 1)
    quick = {"xla_backend_optimization_level": 0}
    monkeypatch.setattr(runner, "compile_options", lambda: quick)
    model, draft = tiny_configs(64, num_attention_heads=8, moe_intermediate_size=256)
    sizes = {"tp_size": 2, "ep_size": 1, "chunks": (8, 16), "contexts": (0, 40)}
    job = PrefillJob(model, draft, **sizes, kernels="reference", dtype="float32")
    rows = list(prefill.measure(job))
    assert [(row.chunk, row.context) for row in rows] == [(8, 0), (8, 40), (16, 0), (16, 40)]
    assert all(row.seconds > 0 for row in rows)
    # Each pair of a row and a latent it sees: two products of c, one of r, for a rank's heads.
    each = 2 * model.num_attention_heads // 2 * (2 * model.kv_lora_rank + model.qk_rope_head_dim)
    assert rows[1].attention == each * model.num_hidden_layers * (8 * 40 + 36)
    assert rows[2].dense == 2 * rows[0].dense
    assert rows[2].experts == 2 * rows[0].experts


def test_a_line_and_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("k26jax.pallas.gpu.architecture", lambda: "sm_90")
    monkeypatch.setattr(timing, "operations_a_second", lambda: 8e14)
    monkeypatch.setattr(prefill, "measure", lambda job: iter([ROW]))
    file = tmp_path / "figures.json"
    assert main(["bench", "prefill", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "50.00 ms,     5120 tokens/s,  160.0 TFLOP/s,  20% of XLA's matrix rate" in out
    assert json.loads(file.read_text())["rows"][0]["chunk"] == 256


@pytest.mark.parametrize("flags", [["--chunk", "0"], ["--context", "x"], ["--tp-size", "0"]])
def test_what_cannot_be_measured_is_named(flags, capsys):
    assert main(["bench", "prefill", *flags]) != 0
    assert flags[0] in capsys.readouterr().err
