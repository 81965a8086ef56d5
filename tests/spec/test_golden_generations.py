"""G5: whole generations of the published DFlash and DDTree code, round by round."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from fixtures.pairs import CAPACITY, N_STEPS, Ask, folder_pair, read

from k26jax.spec.plan import Plan

# Each shape is a program of its own; the other shapes run with the slow tests.
ALWAYS = {
    (1, "ar", None),
    (8, "dflash", None),
    (8, "ddtree", 8),
    (8, "ddtree", 16),
    (8, "ddtree", 64),
    (4, "ddtree", 12),
}


def _name(value) -> str:
    return str(value).strip("/").split("/")[-1]


def _cases(config) -> list:
    cases = []
    for path in _files(Path(config.getoption("--golden-dir"))):
        for index, run in enumerate(read(path)["runs"]):
            label = f"{path.stem}-{run['method']}-B{run['block_size']}-{run.get('tree_budget')}"
            shape = run["block_size"], run["method"], run.get("tree_budget")
            marks = () if shape in ALWAYS else (pytest.mark.slow,)
            cases.append(pytest.param(path, index, id=f"{label}-{index}", marks=marks))
    return cases


def _files(golden_dir: Path) -> list[Path]:
    return sorted((golden_dir / "ddtree").glob("generate_*.json"))


@functools.cache
def _sizes(golden_dir: Path) -> tuple[int, int]:
    """The capacity and the steps that the longest generation of the folder takes."""
    capacity, n_steps = CAPACITY, N_STEPS
    for golden in map(read, _files(golden_dir)):
        block = max(run["block_size"] for run in golden["runs"])
        # Decoding runs a block longer than the recorded text, one token a step at worst.
        n_steps = max(n_steps, golden["max_new_tokens"] + block)
        capacity = max(capacity, len(golden["prompt_ids"]) + golden["max_new_tokens"] + block)
    return capacity, n_steps


def pytest_generate_tests(metafunc):
    if "golden_run" in metafunc.fixturenames:
        metafunc.parametrize(("golden_run", "run_index"), _cases(metafunc.config))


def _plan(run) -> Plan:
    block = run["block_size"]
    if run["method"] == "ar":
        return Plan.plain()
    if run["method"] == "dflash":
        return Plan.chain(block - 1, block)
    budget = run.get("tree_budget")
    return Plan.tree(block - 1 if budget is None else budget, block - 1, block)


def test_generation_equals_the_published_code(golden_run, run_index, golden_dir):
    """Tokens, acceptance lengths, and for trees every round's tree and accepted path."""
    golden = read(golden_run)
    run = golden["runs"][run_index]
    programs, params = folder_pair(
        golden_dir / "models" / _name(golden["target"]),
        golden_dir / _name(golden["drafter"]),
        *_sizes(golden_dir),
    )
    plan, prompt = _plan(run), tuple(golden["prompt_ids"])
    stop_ids = tuple(run["stop_token_ids"] or ())
    ask = Ask(prompt, max_tokens=golden["max_new_tokens"], stop_ids=stop_ids)
    tokens, _, _ = programs.run(params, [None, ask, None], plan, record_trees=True)
    assert list(prompt) + tokens[1] == run["output_ids"]

    expected = run.get("full_blocks", run)
    lengths = expected.get("acceptance_lengths")
    if lengths is None:
        return
    # The published loop runs on until the last token is committed too: give it a block more.
    longer = Ask(prompt, max_tokens=golden["max_new_tokens"] + run["block_size"])
    state, _ = programs.admit(params, [None, longer, None])
    program = programs.steps(plan, True)
    _, steps = jax.device_get(program(params, state, len(lengths)))
    assert steps.accepted_len[: len(lengths), 1].tolist() == lengths
    start = len(prompt)
    for index, round_ in enumerate(expected.get("rounds") or ()):
        assert round_["start"] == start
        _check_round(round_, jax.tree.map(lambda x, i=index: x[i, 1], steps.trees), steps, index)
        start += lengths[index]


def _check_round(round_, tree, steps, index) -> None:
    golden = round_["tree"]
    accepted = steps.accepted_len[index, 1]
    path = steps.paths[index, 1, :accepted].tolist()
    mine = _paths(tree.token_ids[tree.valid][1:], tree.parent[tree.valid])
    theirs = _paths(np.array(golden["node_token_ids"]), np.array(golden["parents"]))
    if round_["min_gap"] is None or round_["min_gap"] >= 1e-4:
        assert mine == theirs
        assert path == round_["accepted_indices"]
    else:
        assert set(mine) == set(theirs)
        assert mine[path[-1]] == theirs[round_["accepted_indices"][-1]]


def _paths(token_ids, parents) -> list[tuple[int, ...]]:
    """Each node's tokens from the root down; () for the root."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append((*paths[parent], int(token_ids[node - 1])))
    return paths


def test_sizes_follow_the_folder(golden_dir, tmp_path):
    """A folder of longer generations than ours gets the room and the steps that they take."""
    (tmp_path / "ddtree").mkdir()
    golden = {"prompt_ids": [1] * 100, "max_new_tokens": 90, "runs": [{"block_size": 16}]}
    (tmp_path / "ddtree" / "generate_long.json").write_text(json.dumps(golden))
    assert _sizes(tmp_path) == (206, 106)
    capacity, n_steps = _sizes(golden_dir)
    assert capacity >= CAPACITY
    assert n_steps >= N_STEPS
