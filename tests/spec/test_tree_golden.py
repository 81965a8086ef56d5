"""Draft trees against golden data: cases, rounds of whole generations, digests, worked examples."""

import functools
import hashlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from spec.oracle import walk
from spec.tree_checks import BUDGETS, DEPTHS, build, check_structure, mask_of, path_scores

from k26jax.spec.tree import draft_table


def pytest_generate_tests(metafunc):
    if "golden_case" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--golden-dir")) / "ddtree"
        cases = json.loads((folder / "trees.json").read_text())["cases"]
        names = [f"{case['id']}-{case['kind']}" for case in cases]
        metafunc.parametrize("golden_case", cases, ids=names)


@pytest.fixture(scope="module")
def golden_arrays(golden_dir):
    with np.load(golden_dir / "ddtree" / "trees.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def golden_table(golden_dir, golden_arrays):
    """A function from logits to their draft table: one program, logits padded with -inf.

    Its shape is that of the deepest and the widest logits that the folder holds.
    """
    shapes = [x.shape for name, x in golden_arrays.items() if name.endswith(".logits")]
    for path in _generations(golden_dir):
        with np.load(path) as arrays:
            shapes += [x.shape for x in arrays.values()]
    shape = max(DEPTHS, *(rows for rows, _ in shapes)), max(width for _, width in shapes)
    program = jax.jit(functools.partial(draft_table, budget=BUDGETS[-1]))

    def table(logits):
        wide = np.full(shape, -np.inf, np.float32)
        wide[: logits.shape[0], : logits.shape[1]] = logits
        return jax.device_get(program(wide))

    return table


def _generations(golden_dir):
    return sorted((golden_dir / "ddtree").glob("generate_*.npz"))


def test_golden_tree(golden_case, golden_arrays, golden_table):
    name, budget = f"case{golden_case['id']:03d}", min(golden_case["budget"], BUDGETS[-1])
    logits = golden_arrays[f"{name}.logits"]
    table = golden_table(logits)
    tree = build(*table, budget)
    check_structure(tree)
    nodes = min(len(golden_arrays[f"{name}.node_token_ids"]), budget)
    scores = golden_arrays[f"{name}.scores"][:nodes]
    finite = int(np.isfinite(scores).sum())
    assert min(int(tree.valid.sum()) - 1, budget) == finite
    if not golden_case["float_sensitive"]:
        fields = [golden_arrays[f"{name}.{key}"] for key in ("node_token_ids", "node_depths")]
        np.testing.assert_array_equal(tree.token_ids[1 : nodes + 1], fields[0][:nodes])
        np.testing.assert_array_equal(tree.depth[1 : nodes + 1], fields[1][:nodes])
        np.testing.assert_array_equal(
            tree.parent[: nodes + 1], golden_arrays[f"{name}.parents"][: nodes + 1]
        )
        np.testing.assert_array_equal(
            np.asarray(mask_of(tree))[: nodes + 1, : nodes + 1],
            golden_arrays[f"{name}.visibility"][: nodes + 1, : nodes + 1],
        )
    own = path_scores(tree, *table)[:finite]
    assert (np.diff(own) <= 0).all()
    atol = 1e-3 if golden_case["kind"].startswith("offset_") else 2e-5
    np.testing.assert_allclose(
        own, np.sort(scores[np.isfinite(scores)])[::-1], rtol=1e-6, atol=atol
    )


def test_golden_verify_inputs(golden_dir, golden_arrays, golden_table):
    with np.load(golden_dir / "ddtree" / "verify_inputs.npz") as arrays:
        steps = dict(arrays)
    names = sorted({key.split(".")[0] for key in steps})
    assert names
    for name in names:
        expected = {key.split(".")[1]: x for key, x in steps.items() if key.startswith(name + ".")}
        logits = golden_arrays[f"case{int(expected['case']):03d}.logits"]
        rows, start = len(expected["input_ids"]), int(expected["start"])
        tree = build(*golden_table(logits), rows - 1)
        tree = tree.with_root(expected["root_token"])
        np.testing.assert_array_equal(tree.token_ids[:rows], expected["input_ids"])
        np.testing.assert_array_equal(start + tree.depth[:rows], expected["position_ids"])
        mask = np.asarray(mask_of(tree))[:rows, :rows]
        mask = np.concatenate([np.ones((rows, start), bool), mask], axis=1)
        np.testing.assert_array_equal(mask, expected["may_attend"])


def test_golden_generations(golden_dir, golden_table):
    """Trees of whole generations, from the draft logits of each round."""
    seen = 0
    for path in _generations(golden_dir):
        runs = json.loads(path.with_suffix(".json").read_text())["runs"]
        trees = [run for run in runs if "rounds" in run and not run["stop_token_ids"]]
        rounds = {f"B{r['block_size']}_budget{r['tree_budget']}": r["rounds"] for r in trees}
        with np.load(path) as arrays:
            for key, logits in arrays.items():
                run, number, _ = key.split(".")
                record = rounds[run][int(number.removeprefix("round"))]
                if record["block_length"] != logits.shape[0] + 1 or record.get("token_tie"):
                    continue
                expected = record["tree"]
                tree = build(*golden_table(logits), len(expected["node_token_ids"]))
                nodes = len(expected["node_token_ids"])
                found = sorted(paths(tree.token_ids[: nodes + 1], tree.parent[: nodes + 1]))
                assert found == sorted(paths([0, *expected["node_token_ids"]], expected["parents"]))
                if record["min_gap"] is None or record["min_gap"] > 1e-4:
                    assert tree.parent[: nodes + 1].tolist() == expected["parents"]
                    assert tree.token_ids[1 : nodes + 1].tolist() == expected["node_token_ids"]
                seen += 1
    assert seen > 0


def paths(tokens, parents):
    found = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], int(token)))
    return found


# The published builder's trees for tables of multiples of 1/1024 (seed, L, K, budget, range).
DIGESTS = [
    (1, 1, 4, 4, 64, "637cb7de0007e8fcc5799cb85ef3e1e8afdadd098c718045c1edcc5302e84bb7"),
    (2, 3, 8, 8, 512, "c231d8a34c124cb6cf1636520b5e14bf51e59d2827364c6600c8c97da0c70eb2"),
    (3, 7, 16, 16, 256, "6cd7b09718f3833bd4cdf3a42110e75e4ec8017065e6812830c5622b23c18ed4"),
    (4, 7, 32, 32, 256, "ccc0277a50d22c4ac14cc2a51278013859af1ff5e0c51a60d02ba0bfb827bd34"),
    (5, 7, 64, 64, 128, "2762dddab8122caa26d02b2341332b79868c117954961fb8a15812e8b5252ada"),
    (6, 15, 64, 64, 256, "c6897e58379b56c61a5bfcec67bbbd85238016775a3fc54fe1e0578e774c77bc"),
    (7, 15, 128, 128, 64, "a94ffa54d0f3f643cb2fa12dc68a05a59a34fccfad4ac3ab439fffff1b35db0b"),
    (8, 7, 32, 32, 1, "a5966d9b21f531847e9ce36bd3142b2d82082b59fe85daf9702267f4c7b7664d"),
    (9, 15, 64, 64, 2, "a8a2afefc1e20111c5693d24e5d71860a7e574f6a31fa12ae8b90405f246c48b"),
    (10, 3, 2, 20, 16, "f848bd50050bd7b642b51855f3c278cb0a277c8b40170d859503e34b205e63d5"),
    (11, 7, 8, 60, 200, "8fc1e923cfa4992731cbfcaa0694ae7d23d7ad8854c679c642ff9cf0dfbf7b3e"),
    (12, 15, 22, 22, 700, "6a4b4a4ef721dc4c4a32e9c06b5a825eb4f098b442a00409ffcc322cd15bedee"),
]


def mix(x):
    """The last steps of splitmix64."""
    x = x % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize(("seed", "depths", "width", "budget", "spread", "digest"), DIGESTS)
def test_published_builder_digest(seed, depths, width, budget, spread, digest):
    factors = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

    def gap(d, r):
        return 1 + mix(seed * factors[0] + d * factors[1] + r * factors[2]) % spread

    gaps = [[gap(d, r) for r in range(width)] for d in range(depths)]
    tokens = [
        [(7919 * r + 104729 * d + 31 * seed) % 163840 for r in range(width)] for d in range(depths)
    ]
    tree = build(-np.cumsum(gaps, axis=1) / 1024, tokens, budget)
    nodes = min(int(tree.valid.sum()) - 1, budget)
    lists = [tree.token_ids[1:], tree.depth[1:], tree.parent]
    record = [x[:n].tolist() for x, n in zip(lists, (nodes, nodes, nodes + 1), strict=True)]
    text = json.dumps(record, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == digest


# Logits, budget, tree (tokens, depths, parents), visible rows; then posteriors with their walks.
TREE_1 = {
    "logits": [[2, 1, 0.5, -1, -2], [0.2, 3, 2.5, 0, -1], [1.5, 1.25, -0.5, 0.75, 0]],
    "tokens": [0, 1, 1, 2, 2, 0],
    "depths": [1, 2, 1, 2, 1, 3],
    "parents": [-1, 0, 1, 0, 1, 0, 2],
    "visible": "1000000 1100000 1110000 1001000 1100100 1000010 1110001",
}
EXAMPLES = [
    TREE_1
    | {"root": 4, "posterior": [1, 4, 0, 2, 3, 3, 3], "accepted": [0, 3], "tokens_out": [4, 1, 2]},
    TREE_1
    | {
        "root": 4,
        "posterior": [0, 1, 0, 2, 3, 3, 4],
        "accepted": [0, 1, 2, 6],
        "tokens_out": [4, 0, 1, 0, 4],
    },
    {  # all gaps are 1: scores tie exactly and the rank tuple decides
        "logits": [[3, 2, 1, 0], [5, 4, 3, 2], [1, 0, -1, -2]],
        "tokens": [0, 0, 0, 1, 1, 0, 1, 0, 0],
        "depths": [1, 2, 3, 1, 2, 2, 3, 3, 3],
        "parents": [-1, 0, 1, 2, 0, 1, 4, 2, 5, 6],
        "visible": "1000000000 1100000000 1110000000 1111000000 1000100000 1100010000 1000101000 "
        "1110000100 1100010010 1000101001",
        "root": 2,
        "posterior": [1, 2, 2, 0, 3, 1, 3, 0, 2, 1],
        "accepted": [0, 4],
        "tokens_out": [2, 1, 3],
    },
    {  # tokens of probability 1 first; a vocabulary of 2 under a budget of 12
        "logits": [[60, 0], [1, 1.5], [50, -50], [0.25, 0]],
        "tokens": [0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0],
        "depths": [1, 2, 3, 2, 3, 4, 4, 4, 4, 1, 2, 3],
        "parents": [-1, 0, 1, 2, 1, 4, 3, 3, 5, 5, 0, 10, 11],
        "visible": "1000000000000 1100000000000 1110000000000 1111000000000 1100100000000 "
        "1100110000000 1111001000000 1111000100000 1100110010000 1100110001000 1000000000100 "
        "1000000000110 1000000000111",
        "root": 1,
        "posterior": [0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        "accepted": [0, 1, 2, 3, 7],
        "tokens_out": [1, 0, 1, 0, 1, 0],
    },
]


@pytest.mark.parametrize("example", EXAMPLES, ids=["EX1", "EX1b", "EX2", "EX3"])
def test_worked_example(example, golden_table):
    rows = len(example["parents"])
    logits = np.array(example["logits"], np.float32)
    tree = build(*golden_table(logits), rows - 1).with_root(example["root"])
    check_structure(tree)
    tokens, parents = np.asarray(tree.token_ids)[:rows].tolist(), tree.parent[:rows].tolist()
    assert tokens == [example["root"], *example["tokens"]]
    assert tree.depth[1:rows].tolist() == example["depths"]
    assert parents == example["parents"]
    visible = np.array([[bit == "1" for bit in row] for row in example["visible"].split()])
    mask = np.asarray(mask_of(tree))[:rows, :rows]
    np.testing.assert_array_equal(mask, visible)

    posterior = np.array(example["posterior"])
    match = np.array(tokens) == posterior[np.array(parents)]
    match[0] = True
    accepted = np.flatnonzero((match | ~mask).all(axis=1)).tolist()
    assert accepted == example["accepted"]
    assert [tokens[i] for i in accepted] + [posterior[accepted[-1]]] == example["tokens_out"]
    assert walk(tokens, parents, example["posterior"]) == (accepted, posterior[accepted[-1]])
