"""The performance model against the specification's arithmetic, and fitted to made-up records."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from fixtures.paths import REPOSITORY

from k26jax.bench.acceptance import chain_rate, tree_accept_length
from k26jax.bench.calibrate import calibrated, compare, merged, read_measured, worst
from k26jax.bench.costs import ALL_REDUCES, CARDS, AllReduce, Costs, all_reduce, card
from k26jax.bench.perf_model import Setting, best, predict, rank_bytes, touched_experts
from k26jax.bench.published import published
from k26jax.cli import main
from k26jax.commands.plan import read_routing
from k26jax.errors import ConfigError


def _setting(**changes) -> Setting:
    model, draft = published("kimi-k2.6")
    usual = {"card": card("h200"), "all_reduce": all_reduce("nvlink", "published")}
    return replace(Setting(model, draft, costs=Costs(), tp_size=8, **usual), **changes)


@pytest.mark.parametrize(
    ("width", "experts", "milliseconds"),
    [(1, 8.0, 1.256), (8, 59.52, 3.251), (16, 109.82, 5.197), (32, 188.23, 8.233)],
)
def test_floors_of_the_specification(width, experts, milliseconds):
    """A rank of TP-8 at 4.8 TB/s with replicated q_a, kv_a and router, no cache and no drafter."""
    sheet = replace(card("h200"), read_bytes_a_second=4.8e12)
    step = predict(_setting(card=sheet, draft=None, context=0), width)
    assert step.touched == pytest.approx(experts, abs=0.01)
    assert step.floor_seconds * 1e3 == pytest.approx(milliseconds, rel=0.005)


def test_bytes_of_the_specification():
    held = rank_bytes(_setting())
    # 76.18 GB of the target and 0.87 GB of the drafter.
    assert held["weights"] == pytest.approx(76.18e9 + 0.870e9, rel=1e-3)
    without = rank_bytes(_setting(draft=None, context=32768, users=2))
    assert without["cache"] == 2 * 32768 * 70_272
    whole = rank_bytes(_setting(draft=None, tp_size=1, ep_size=8))
    assert whole["weights"] == pytest.approx(94.79e9, rel=1e-3)


def test_kernels_are_those_of_the_compiled_programs():
    """Counted in the steps that ran on an H200 (5b9b67e): 997 with one row, 1217 with 16."""
    assert predict(_setting(), 1).kernels == pytest.approx(997, rel=0.01)
    assert predict(_setting(), 16).kernels == pytest.approx(1217, rel=0.01)


@pytest.mark.parametrize(("rows", "busiest"), [(1, 2.57), (8, 11.2), (16, 18.3), (32, 28.5)])
def test_the_busiest_of_eight_expert_ranks(rows, busiest):
    setting = _setting(tp_size=1, ep_size=8)
    assert touched_experts(setting, rows) == pytest.approx(busiest, rel=0.05)
    alone = replace(setting, waits=False)
    assert touched_experts(alone, rows) == pytest.approx(384 * (1 - (1 - 1 / 48) ** rows) / 8)


def test_all_reduces_between_and_beyond_their_points():
    sums = AllReduce("made up", ((100, 1e-6), (200, 3e-6), (300, 4e-6)), "")
    found = [sums.seconds(n) for n in (1, 100, 150, 250, 400)]
    assert found == pytest.approx([1e-6, 1e-6, 2e-6, 3.5e-6, 5e-6])
    for known in itertools.chain(*ALL_REDUCES.values()):
        assert known.source
        times = [known.seconds(1 << power) for power in range(8, 24)]
        assert times == sorted(times)
    with pytest.raises(ConfigError, match="did you mean 'measured'"):
        all_reduce("nvlink", "mesured")
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        card("h20")
    assert all(item.source for item in CARDS.values())


def test_more_of_anything_takes_longer():
    base = predict(_setting(), 8)
    for changes in ({"context": 65536}, {"users": 4}, {"hosts": 2}, {"card": card("rtx-pro-6000")}):
        assert predict(_setting(**changes), 8).seconds > base.seconds
    steps = [predict(_setting(accept_length=5.3), width) for width in (1, 2, 8, 64)]
    assert [step.seconds for step in steps] == sorted(step.seconds for step in steps)
    assert best(steps).width == 8


def test_a_trees_tokens_are_those_of_the_most_probable_prefixes():
    depth, rate = 3, chain_rate(2.5, 3)
    assert sum(rate**d for d in range(depth + 1)) == pytest.approx(2.5)
    of_rank = [rate, *((1 - rate) / 2**rank for rank in range(1, 12))]
    prefixes = [
        path for d in range(1, depth + 1) for path in itertools.product(of_rank[:8], repeat=d)
    ]
    products = []
    for path in prefixes:
        product = 1.0
        for each in path:
            product *= each
        products.append(product)
    for budget in (1, 2, 7, 20):
        best_ones = sorted(products, reverse=True)[:budget]
        assert tree_accept_length(rate, depth, budget) == pytest.approx(1 + sum(best_ones))
    with pytest.raises(ConfigError, match="gives 1 to 8 tokens"):
        chain_rate(9, 7)


def _record(costs: Costs, widths=(1, 2, 8, 16, 64), slower: float = 1.0):
    """What bench rank would write of a machine with these costs."""
    setting = replace(
        _setting(costs=costs), all_reduce=AllReduce("none", ((0, 0.0),), ""), waits=False
    )
    rows = []
    for width in widths:
        step = predict(setting, width)
        seconds = (sum(step.stage_seconds.values()) * slower + 1e-4) * 1.001
        row = {"width": width, "stage": "step", "seconds": seconds, "host_share": 1e-4 / seconds}
        rows.append({**row, "touched": step.touched})
        for stage, each in step.stage_seconds.items():
            rows.append({"width": width, "stage": stage, "seconds": each})
    names = {"config": "kimi-k2.6", "layers": 61, "tp_size": 8, "ep_size": 1, "context": 4096}
    return {**names, "device": "made up", "read_bytes_a_second": 4.27e12, "rows": rows}


def test_costs_are_found_in_a_record():
    usual = Costs()
    slow = replace(
        usual,
        launch_seconds={name: 1.4 * cost for name, cost in usual.launch_seconds.items()},
        efficiency={**usual.efficiency, "int4_moe": 0.5},
        stage_factor={"draft": 1.2},
    )
    record = _record(slow, slower=1.1)
    assert worst(compare(record, _setting())) > 0.2
    costs = calibrated(record, _setting())
    assert costs.launch_seconds["dense"] == pytest.approx(1.4 * 4e-6, rel=0.02)
    assert costs.efficiency["int4_moe"] == pytest.approx(0.5, rel=0.02)
    assert costs.factor("step") == pytest.approx(1.1, rel=0.01)
    assert costs.host_seconds == pytest.approx(1e-4)
    rows = compare(record, _setting(costs=costs))
    assert worst(rows) < 0.02
    assert all(abs(row.error) < 0.1 for row in rows)
    few = calibrated(_record(slow, widths=(1, 16)), _setting())
    assert few.efficiency == usual.efficiency
    assert worst(compare(_record(slow, widths=(1, 16)), _setting(costs=few))) < 0.15


def test_a_file_that_is_no_record_is_refused(tmp_path):
    path = tmp_path / "record.json"
    for text in ("", "[]", "{}", '{"rows": [1]}', json.dumps({**_record(Costs()), "rows": []})):
        path.write_text(text)
        with pytest.raises(ConfigError, match="bench rank --json"):
            read_measured(path)
    path.write_text(json.dumps(_record(Costs())))
    assert read_measured(path)["tp_size"] == 8


def test_files_of_different_widths_count_as_one(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path, widths in zip(paths, [(1, 16), (8,), (32,)], strict=True):
        path.write_text(json.dumps(_record(Costs(), widths=widths)))
    record = merged(paths)
    assert [row["width"] for row in record["rows"] if row["stage"] == "step"] == [1, 16, 8, 32]
    assert worst(compare(record, _setting(costs=calibrated(record, _setting())))) < 0.02
    paths[1].write_text(json.dumps({**_record(Costs()), "context": 99}))
    with pytest.raises(ConfigError, match="has context 99"):
        merged(paths)


def test_routing_from_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"topk_ids": [[[[0, 1], [1, 2]], [[0, 1], [0, 1]]]]}))
    assert read_routing(path) == ((1, 2.0), (2, 2.5))
    path.write_text(json.dumps({"touched": {"1": 8, "16": 90.5}}))
    routing = read_routing(path)
    assert touched_experts(_setting(routing=routing), 16) == 90.5
    path.write_text(json.dumps({"topk": []}))
    with pytest.raises(ConfigError, match="expected an object with 'touched'"):
        read_routing(path)


def test_the_command(tmp_path, capsys):
    measured, picture = tmp_path / "rank.json", tmp_path / "plan.png"
    measured.write_text(json.dumps(_record(Costs())))
    flags = ["--accept-length", "5.3", "--plot", str(picture), "--measured", str(measured)]
    assert main(["plan", *flags]) == 0
    said = capsys.readouterr().out
    assert "greatest error of a step" in said
    assert "each GPU: 77.05 GB of weights + 0.30 GB of cache of 149.3 GB: fits" in said
    assert said.count("best: budget 7 (width 8): ") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "--algorithm", "NONE", "--all-reduce", "published", "--users", "4"]) == 0
    said = capsys.readouterr().out
    assert "best: plain decoding (width 1): " in said
    assert "of all users" in said


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--gpus", "4"], 4, "each GPU would hold 15"),
        (["--tp-size", "3"], 3, "--tp-size 3 times --ep-size 1 is not --gpus 8"),
        (["--gpus", "6"], 3, "--tp-size 6 does not share 64 attention heads"),
        (["--hosts", "3"], 3, "cannot be shared evenly by --hosts 3"),
        (["--context", "999999"], 3, "has 262144 positions"),
        (["--users", "0"], 3, "--users 0: expected 1 or more"),
        (["--accept-length", "12"], 3, "a chain of 7 drafted tokens gives 1 to 8"),
        (["--measured", "/nowhere"], 3, "is no file of `k26jax bench rank --json`"),
        (["--gpu", "h20"], 2, "did you mean 'h200'"),
    ],
)
def test_what_is_refused(flags, code, said, capsys):
    assert main(["plan", *flags]) == code
    assert said in capsys.readouterr().err


def test_planning_loads_no_jax():
    code = (
        "import sys; from k26jax.cli import main; "
        "assert main(['plan', '--width', '8']) == 0; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, capture_output=True)


def test_costs_name_every_family():
    costs = asdict(Costs())
    assert costs["launch_seconds"].keys() == costs["efficiency"].keys()
