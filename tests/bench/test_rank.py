"""One rank alone: what it holds and runs is what a rank of a mesh does; its rows add up."""

from __future__ import annotations

import collections
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.pairs import tiny_configs

from k26jax.bench import rank, stages, timing
from k26jax.bench.dummy import dummy_engine, plan_of
from k26jax.bench.one_rank import rank_engine
from k26jax.bench.published import MODELS, published
from k26jax.bench.rank import Job, StageRow, StepRow, TokensRow, independent_experts, measure
from k26jax.cli import main
from k26jax.commands import bench_rank
from k26jax.config import EngineConfig, Quantization
from k26jax.engine import runner
from k26jax.engine.runner import Runner
from k26jax.errors import ConfigError, MeshError

QUICK = {"xla_backend_optimization_level": 0}


def _pair():
    """A target of one dense and one MoE layer and a drafter, which up to eight ranks can share."""
    model, draft = tiny_configs(
        64, num_attention_heads=8, moe_intermediate_size=256, num_hidden_layers=2
    )
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    one = {"num_hidden_layers": 1, "windows": (None,), "causal": (False,)}
    return model, replace(draft, **heads, **one, num_target_layers=2, target_layer_ids=(0, 1))


def _job(**changes) -> Job:
    model, draft = _pair()
    defaults = {
        "tp_size": 8, "ep_size": 1, "context": 24, "widths": (1, 4), "kernels": "reference",
        "algorithms": ("NONE", "DDTREE"), "dtype": "float32", "dispatches": 1,
    }  # fmt: skip
    return Job(model, draft, **{**defaults, **changes})


def _engines(kernels: str, tp_size: int, ep_size: int):
    """The engine of a mesh, and that of its first rank alone."""
    model, draft = _pair()
    config = EngineConfig(
        model_path="dummy",
        context_length=64,
        tp_size=tp_size,
        ep_size=ep_size,
        kernels=kernels,
        dtype="bfloat16",
        steps_per_dispatch=2,
    )
    plan, _ = plan_of(4, draft, kernels)
    made = dummy_engine(config, model, draft, plan, jnp.bfloat16)
    return made, rank_engine(config, model, draft, plan)


def _kernels(engine) -> collections.Counter:
    """The kernels of a step, with the shapes they are called with."""
    found: collections.Counter = collections.Counter()

    def walk(jaxpr) -> None:
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if equation.primitive.name == "pallas_call":
                shapes = [str(x.aval) for x in (*equation.invars, *equation.outvars)]
                found[equation.params["name"], *shapes] += 1
            else:
                for value in equation.params.values():
                    several = value if isinstance(value, tuple | list) else (value,)
                    for inner in several:
                        if hasattr(inner, "eqns"):
                            walk(inner)

    run = Runner(engine)
    program = run._placed(run._steps_program(False, False), 1)
    state = jax.eval_shape(run._make_state)
    walk(jax.make_jaxpr(program)(engine.params, state, np.int32(1)).jaxpr)
    return found


@pytest.mark.parametrize(
    ("tp_size", "ep_size"), [(2, 4), pytest.param(8, 1, marks=pytest.mark.slow)]
)
def test_a_rank_alone_holds_and_launches_what_a_rank_of_a_mesh_does(tp_size, ep_size):
    mesh, alone = _engines("pallas", tp_size, ep_size)
    shapes = jax.tree.map(lambda x: x.addressable_shards[0].data.shape, mesh.params)
    assert jax.tree.map(lambda x: x.shape, alone.params) == shapes
    shards = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), mesh.state_shapes())
    assert jax.tree.map(lambda x: x.shape, alone.state_shapes()) == shards
    kernels = _kernels(alone)
    assert kernels == _kernels(mesh)
    assert len(kernels) > 20


@pytest.fixture
def quick(monkeypatch):
    """Programs are compiled quickly and timed once."""
    for module in (stages, runner):
        monkeypatch.setattr(module, "compile_options", lambda: QUICK)
    monkeypatch.setattr(stages, "_TURNS", (1, 2))
    monkeypatch.setattr(stages, "_REPEATS", 1)


def _stages_of(rows, width: int) -> list[StageRow]:
    return [row for row in rows if type(row) is StageRow and row.width == width]


def test_plain_decoding_is_measured(quick):
    rows = list(measure(_job(algorithms=("NONE",))))
    (step,) = (row for row in rows if isinstance(row, StepRow))
    assert (step.algorithm, step.width, step.touched, step.independent) == ("NONE", 1, 2, 2)
    assert (step.different_tokens, step.accept_length) == (1, 1)
    assert [row.stage for row in _stages_of(rows, 1)] == ["verify", "accept", "compact"]
    assert step.n_bytes == sum(row.n_bytes for row in _stages_of(rows, 1))
    # Target without drafter: all weights but six experts and the unread rows of the embedding.
    assert step.n_bytes < 60_000
    assert 0 < sum(row.kernels for row in _stages_of(rows, 1)) <= step.kernels
    assert step.seconds > 0
    assert step.layer_kernels > 0


@pytest.mark.slow
def test_trees_are_measured_and_their_tokens_are_plain_decodings(quick):
    rows = list(measure(_job(check_tokens=12)))
    one, tree = (row for row in rows if isinstance(row, StepRow))
    assert (one.algorithm, tree.algorithm) == ("NONE", "DDTREE")
    stage_names = ["draft", "tree_build", "verify", "accept", "compact"]
    assert [row.stage for row in _stages_of(rows, 4)] == stage_names
    assert rows[-1] == TokensRow("DDTREE", 4, 12, 12)
    assert 2 <= tree.touched <= 8
    assert tree.different_tokens > 1
    assert tree.n_bytes == sum(row.n_bytes for row in _stages_of(rows, 4))
    assert _stages_of(rows, 4)[1].heap_seconds > 0


@pytest.mark.slow
def test_experts_that_other_ranks_hold_are_not_counted(quick):
    """Of 8 experts a rank of EP-4 holds two; each row chooses two of all."""
    _, alone = _engines("reference", 1, 4)
    run = Runner(alone)
    run.reset()
    run.occupy(0, length=24, max_tokens=99)
    assert 0 <= stages.Stages(alone).routing(run.state, 2).touched <= 2


def test_independent_experts():
    kimi, _ = published("kimi-k2.6")
    found = [independent_experts(kimi, 1, rows) for rows in (1, 8, 16, 64)]
    assert found == pytest.approx([8, 59.52, 109.82, 284.19], abs=0.005)
    assert independent_experts(kimi, 8, 16) == pytest.approx(109.82 / 8, abs=0.001)


def test_the_order_of_widths_and_what_cannot_be_measured():
    job = _job(widths=(64, 2, 1, 3, 8, 16))
    assert job.turns() == [1, 16, 8, 64, 2, 3]
    assert _job(widths=(8, 1), algorithms=("DDTREE",)).turns() == [8]
    assert _job(widths=(8, 16), algorithms=("NONE",)).turns() == [1]
    with pytest.raises(ConfigError, match=r"trees \(DDTREE\) have 2 and more"):
        _job(widths=(1,), algorithms=("DDTREE",)).turns()
    with pytest.raises(MeshError, match="--tp-size can be"):
        list(measure(_job(tp_size=3)))


def test_published_models():
    """Sizes of the specification; a rank of eight of K2.6 holds 76.18 GB of weights."""
    models = {name: published(name) for name in MODELS}
    kimi, draft = models["kimi-k2.6"]
    assert (kimi.num_hidden_layers, kimi.n_routed_experts, kimi.vocab_size) == (61, 384, 163840)
    assert kimi.quantization is Quantization.INT4_EXPERTS
    assert kimi.softmax_scale == pytest.approx(0.144679625803)
    assert draft.target_layer_ids == (1, 12, 24, 35, 47, 58)
    deep, _ = models["deepseek-v3"]
    assert (deep.n_group, deep.topk_group, deep.first_k_dense_replace) == (8, 4, 3)
    moonlight, _ = models["moonlight"]
    assert (moonlight.q_lora_rank, moonlight.n_shared_experts) == (None, 2)
    for model, drafter in models.values():
        drafter.check_target(model)
    short, drafter = published("kimi-k2.6", 5)
    assert (short.num_hidden_layers, drafter.num_target_layers) == (5, 5)
    assert len(drafter.target_layer_ids) == 6
    for layers in (1, 62):
        with pytest.raises(ConfigError, match=f"--layers {layers}"):
            published("kimi-k2.6", layers)
    with pytest.raises(ConfigError, match=r"did you mean 'kimi-k2\.6'"):
        published("kimi-k26")


ROWS = [
    StepRow("NONE", 1, "step", 4e-3, 1200, 6_000_000_000, layer_kernels=19.5, host_share=0.01,
            touched=8, independent=8, different_tokens=1, accept_length=1),
    StageRow("NONE", 1, "verify", 3.9e-3, 1180, 5_900_000_000),
    StepRow("DDTREE", 16, "step", 1e-2, 1400, 2 * 10**10, layer_kernels=20, host_share=0.004,
            touched=108.2, independent=109.8, different_tokens=16, accept_length=1.25),
    StageRow("DDTREE", 16, "draft", 5e-4, 90, 10**9),
    StageRow("DDTREE", 16, "tree_build", 1e-5, 1, 900, heap_seconds=1e-4),
    StageRow("DDTREE", 16, "compact", 4.9e-4, 22, 10**9),
    TokensRow("DDTREE", 16, 256, 256),
]  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """A GPU is said to be there."""
    monkeypatch.setattr("k26jax.pallas.gpu.architecture", lambda: "sm_90")
    monkeypatch.setattr(timing, "read_bytes_a_second", lambda: 4e12)


def test_lines_a_record_and_a_picture(tmp_path, monkeypatch, capsys, gpu):
    monkeypatch.setattr(rank, "measure", lambda job: iter(ROWS))
    files = tmp_path / "figures.json", tmp_path / "figures.png"
    flags = ["--layers", "4", "--json", str(files[0]), "--plot", str(files[1])]
    assert main(["bench", "rank", *flags]) == 0
    said = capsys.readouterr()
    assert "kimi-k2.6, 4 of 61 layers, one rank of TP-8, context 4096" in said.err
    for text in (
        "NONE   T=1   step          4000.0 us,  1200 kernels,   6.0000 GB, floor   1500.0 us, "
        "ratio 2.67",
        "DDTREE T=16  108.2 distinct experts a layer (109.8 if rows chose independently), 16.0 "
        "different tokens in a tree, 20.0 kernels an MoE layer, the host 0.4% of the step, 1.25",
        "tree_build is 0.10% of the step; the published heap builder on the host takes 100.0 us "
        "(1.00%)",
        "DDTREE T=16  draft, tree_build, accept and compact: 10.0% of the step",
        "DDTREE T=16  256 of 256 greedy tokens are plain decoding's",
    ):
        assert text in said.out
    record = json.loads(files[0].read_text())
    assert (record["layers"], record["tp_size"], record["kernels"]) == (4, 8, "reference")
    assert [row["stage"] for row in record["rows"]][:3] == ["step", "verify", "step"]
    assert record["rows"][0]["floor_seconds"] == pytest.approx(1.5e-3)
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_other_tokens_fail(monkeypatch, capsys, gpu):
    monkeypatch.setattr(rank, "measure", lambda job: iter([TokensRow("DDTREE", 16, 256, 255)]))
    assert main(["bench", "rank"]) == 1
    assert "255 of 256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "needs a GPU"),
        (["--width", "0,3"], "--width 0,3: expected numbers from 1 to 255"),
        (["--algorithm", "DDTRE"], "did you mean 'DDTREE'"),
        (["--context", "262144"], "kimi-k2.6 has 262144 positions"),
        (["--tp-size", "0"], "--tp-size 0: expected 1 or more"),
        (["--layers", "99"], "--layers 99"),
        (["--layer", "9"], "did you mean '--layers'"),
    ],
)
def test_what_is_refused(flags, said, capsys):
    assert main(["bench", "rank", *flags]) != 0
    assert said in capsys.readouterr().err


def test_what_is_said_of_a_model_that_is_not_published_so():
    model, draft = published("deepseek-v3", 5)
    text = bench_rank.about("deepseek-v3", replace(_job(), model=model, draft=draft))
    assert "5 of 61 layers" in text
    assert "experts in bfloat16 as the engine loads them (published in FP8)" in text
    assert "a drafter of the published Kimi one's form" in text
