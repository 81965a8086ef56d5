"""What steps cost: tables on disk, measuring and remembering, and an LLM that goes by them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from k26jax import LLM, SamplingParams
from k26jax.config import EngineConfig
from k26jax.engine import step_costs
from k26jax.engine.loading import prepare
from k26jax.engine.step_costs import CostTable, read_costs, settle_costs
from k26jax.errors import ConfigError

WIDTHS = (1, 2, 6)
TABLE = {
    "contexts": [16, 48],
    "milliseconds": {"plain": [1, 1.5], "1": [2, 2.5], "2": [3, 3.5], "6": [4, 5.5]},
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, max_tokens=24, ignore_eos=True, seed=7)


def options(small_pair, **more) -> dict:
    auto = {"speculative_ddtree_budget": "auto", "speculative_ddtree_widths": "6"}
    return small_pair.options | auto | {"max_running_requests": 1} | more


@pytest.fixture
def table(tmp_path):
    """Writes a table and returns its path."""

    def write(record) -> str:
        path = tmp_path / "costs.json"
        path.write_text(record if isinstance(record, str) else json.dumps(record))
        return str(path)

    return write


def test_a_table_is_what_its_file_says(table):
    costs = read_costs(table(TABLE), WIDTHS)
    assert costs.milliseconds == ((1, 2, 3, 4), (1.5, 2.5, 3.5, 5.5))
    assert CostTable.from_record(costs.record(), WIDTHS, "again") == costs
    fewer = read_costs(table(TABLE), (1, 6))
    assert fewer.milliseconds == ((1, 2, 4), (1.5, 2.5, 5.5))
    assert fewer.only(2).milliseconds == ((1e30, 1e30, 1),) * 2
    assert CostTable(**json.loads(json.dumps(dataclasses.asdict(costs)))).record() == costs.record()


@pytest.mark.parametrize(
    ("record", "mentions"),
    [
        ("{", ["cannot be read"]),
        ({"contexts": [1]}, ["is no table of step costs", "milliseconds", '"plain": [4.1]']),
        (TABLE | {"milliseconds": {"plain": [1, 1], "2": [1, 1]}}, ["no milliseconds of 1, 6"]),
        (TABLE | {"contexts": [48, 16]}, ["contexts are [48.0, 16.0], expected ascending"]),
        (TABLE | {"contexts": [1]}, ["milliseconds of plain are [1.0, 1.5]", "1 contexts"]),
        (
            TABLE | {"milliseconds": TABLE["milliseconds"] | {"2": [0, 1]}},
            ["milliseconds of 2 are [0.0, 1.0]", "positive"],
        ),
    ],
    ids=["no JSON", "no times", "no width", "order", "number", "zero"],
)
def test_what_is_no_table_is_refused_by_name(table, record, mentions):
    path = table(record)
    with pytest.raises(ConfigError) as caught:
        read_costs(path, WIDTHS)
    for mention in [path, *mentions]:
        assert mention in str(caught.value)


def test_a_bad_table_is_refused_before_weights_are_read(small_pair, table):
    path = table({"contexts": []})
    with pytest.raises(ConfigError, match="no table"):
        prepare(EngineConfig(**options(small_pair, speculative_cost_table=path)))


def test_costs_decide_and_tokens_stay(small_pair, compile_cache, table, monkeypatch):
    """The first start measures and keeps, the next remembers; a table overrides both."""
    prompt = small_pair.letters[:5]
    with LLM(**options(small_pair)) as llm:
        measured = llm.step_costs
        assert list(measured["milliseconds"]) == ["plain", "1", "6"]
        assert (np.array(list(measured["milliseconds"].values())) > 0).all()
        llm.engine.runner.reset()
        assert llm.step_costs == measured
        with llm.without_drafter() as plain:
            assert plain.step_costs is None
            expected = [_run(plain, prompt, params) for params in (GREEDY, SEEDED)]
        assert not any(output.metrics.rows for output in expected)
        for cheap, rows in (("plain", 1), ("6", 6)):
            prices = {name: [1 if name == cheap else 99] for name in ("plain", "1", "6")}
            costs = read_costs(table({"contexts": [0], "milliseconds": prices}), (1, 6))
            llm.engine.runner.set_costs(costs)
            for params, plain_output in zip((GREEDY, SEEDED), expected, strict=True):
                output = _run(llm, prompt, params)
                assert output.token_ids == plain_output.token_ids
                counts = output.metrics.rows
                assert sum(counts.values()) == output.metrics.target_forwards
                assert max(counts, key=lambda n: counts[n]) == rows
                found = output.record(5)["metrics"]["rows"]
                assert found == {str(n): count for n, count in counts.items()}

    def refuse(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(step_costs, "measure", refuse)
    prepared = prepare(EngineConfig(**options(small_pair)))
    assert settle_costs(_Clock([]), prepared).record() == measured
    overridden = options(small_pair, speculative_cost_table=table(TABLE))
    costs = settle_costs(_Clock([]), prepare(EngineConfig(**overridden)))
    assert costs.record() == TABLE | {"milliseconds": _without_2(TABLE["milliseconds"])}


def _run(llm: LLM, prompt: str, params: SamplingParams):
    return llm.generate(prompt, params)[0].outputs[0]


def _without_2(milliseconds):
    return {name: times for name, times in milliseconds.items() if name != "2"}


class _Clock:
    """Stands for a runner whose steps take as long as a table says, in made-up seconds."""

    def __init__(self, seconds):
        self.now, self.seconds, self.slots, self.length = 0.0, seconds, 2, 0

    def set_costs(self, costs):
        self.choice = int(np.argmin(costs.milliseconds[0]))

    def prefill(self, slot, request):
        self.length = len(request.prompt_token_ids)

    def occupy(self, slot, *, length, max_tokens):
        self.length = length

    def release(self, slot):
        pass

    def flush(self):
        self.is_flushed = True

    def run(self, limit):
        self.now += 8 * (self.seconds[self.choice] + 1e-6 * self.length * (1 + self.choice))
        return type("Steps", (), {"n_run": np.int32(8)})


def test_far_contexts_have_a_point_of_their_own(small_pair, monkeypatch):
    """Attention there is what it adds over an empty cache: the steps' time but not the prompt's."""
    prepared = prepare(EngineConfig(**options(small_pair)))
    clock = _Clock([1e-3, 2e-3, 3e-3])
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: clock.now)
    near = step_costs.measure(clock, prepared)
    assert clock.is_flushed
    assert near.contexts == (16.0,)
    assert near.milliseconds[0] == pytest.approx([1.016, 2.032, 3.048])
    disturbed = _Clock([1e-3, 9e-3, 3e-3])
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: disturbed.now)
    assert step_costs.measure(disturbed, prepared).milliseconds[0][1] == pytest.approx(3.048)
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: clock.now)
    roomy = dataclasses.replace(prepared, context_length=16384)
    far = step_costs.measure(clock, roomy)
    assert far.contexts == (32.0, 16384 - 8 * (prepared.plan.depth + 1) - 1)
    assert far.milliseconds[0] == pytest.approx([1.032, 2.064, 3.096])
    grown = np.array([1, 2, 3]) * 1e-3 * far.contexts[1]
    assert far.milliseconds[1] == pytest.approx(np.array([1, 2, 3]) + grown)
