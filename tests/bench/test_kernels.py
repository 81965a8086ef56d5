"""`k26jax bench kernels`: what it counts, prints and draws; its times need a GPU."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from k26jax.bench import kernels, timing
from k26jax.bench.kernels import FAMILIES, Rates, Row, measure
from k26jax.cli import main
from k26jax.commands import bench

ROWS = [
    Row("dense", "q_b T=1", 4e-6, 4_718_592, 2_359_296),
    Row("int4_moe", "K2.6 TP-8 T=1, 8 experts", 2e-5, 24_772_608, 88_080_384),
]


@pytest.fixture
def untimed(monkeypatch):
    """A call runs once, and is said to take a second."""

    def once(call, x, operands=()):
        jax.block_until_ready(jax.jit(call, static_argnums=0)(1, x, *operands))
        return 1.0

    monkeypatch.setattr(kernels, "seconds_a_call", once)


@pytest.mark.parametrize("name", FAMILIES)
def test_small_cases_run(name, untimed, monkeypatch):
    monkeypatch.setattr(kernels, "COPIES_BYTES", 1)
    monkeypatch.setattr(kernels, "ROUTINGS", 2)
    row = next(measure([name], small=True))
    assert (row.kernel, row.seconds) == (name, 1.0)
    assert row.n_bytes >= 0


def test_bytes_of_the_experts_of_one_token(untimed, monkeypatch):
    """8 experts of 3 x 7168 x 256 weights at half a byte, a bfloat16 scale for 32: 24.8 MB."""
    case = next(case for case in kernels.MOE if case.name == "K2.6 TP-8 T=1")
    monkeypatch.setattr(kernels, "_tiles", lambda *sizes: jnp.zeros(1))
    monkeypatch.setattr(kernels.int4_moe, "TiledExperts", lambda *tiles: tiles)
    monkeypatch.setattr(kernels.int4_moe, "tiled_experts", lambda x, *rest, **options: x)
    assert kernels._time_moe(case).n_bytes == 24_772_608


def test_seconds_a_call_grow_with_the_work():
    """Products of 700 and of 7: milliseconds beside next to nothing, whatever else runs here."""
    small, large = (
        timing.seconds_a_call(
            lambda number, x, y: x @ y,
            jnp.ones((n, n)),
            (jnp.ones((n, n)),),
            lengths=(1, 6),
            repeats=3,
        )
        for n in (7, 700)
    )
    assert large > 1e-3
    assert large > 3 * abs(small)


def test_a_line_and_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("k26jax.pallas.gpu.architecture", lambda: "sm_90")
    monkeypatch.setattr(timing, "read_bytes_a_second", lambda: 4e12)
    monkeypatch.setattr(timing, "operations_a_second", lambda: 8e14)
    monkeypatch.setattr(kernels, "measure", lambda only: iter(ROWS))
    files = tmp_path / "figures.json", tmp_path / "figures.png"
    assert main(["bench", "kernels", "--json", str(files[0]), "--plot", str(files[1])]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "4.0 us, floor      1.2 us,  1.18 TB/s,  29% of the best" in out[0]
    record = json.loads(files[0].read_text())
    assert record["read_bytes_a_second"] == 4e12
    assert [row["case"] for row in record["rows"]] == [row.case for row in ROWS]
    assert record["operations_a_second"] == 8e14
    assert record["rows"][1]["floor_seconds"] == pytest.approx(6.19e-6, rel=1e-3)
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_many_rows_are_bound_by_operations():
    row = Row("dense", "q_b T=4096", 1e-3, 4_718_592, 2 * 4096 * 2_359_296)
    assert row.floor_seconds(Rates(4e12, 8e14)) == pytest.approx(2.416e-5, rel=1e-3)


def test_the_rate_of_matrices_is_that_of_their_operations(monkeypatch):
    monkeypatch.setattr(timing, "seconds_a_call", lambda *args, **options: 0.5)
    assert timing.operations_a_second(10) == 4000


def test_without_a_gpu_or_with_an_unknown_kernel_it_says_so(capsys):
    assert main(["bench", "kernels"]) == 1
    assert "needs a GPU" in capsys.readouterr().err
    assert main(["bench", "kernels", "--kernel", "int4moe"]) == 1
    assert "did you mean 'int4_moe'" in capsys.readouterr().err


def test_the_plot_names_what_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(bench.KernelError, match=r"k26jax\[bench\]"):
        bench.draw(ROWS, Rates(4e12, 8e14), Path("unused.png"), title="none")
