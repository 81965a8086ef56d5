"""The DFlash drafter: reference rounds, check vectors, masks, and what it must not depend on."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quick import quick_jit
from fixtures.shards import write_shard
from model.drafter_oracle import block_states, generated, generated_weights
from model.golden_model import golden_model

from k26jax.checkpoint.load import load_params
from k26jax.checkpoint.reader import open_checkpoint
from k26jax.config import DraftConfig, RopeConfig
from k26jax.model.cache import DraftCache
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import abstract, bind
from k26jax.pallas.norm import append
from k26jax.spec.draft import draft
from k26jax.spec.plan import Plan
from k26jax.spec.state import Models, SpecState

# The sequence under test has an idle neighbour in front of it.
BATCH, PLACE = 2, 1


def pytest_generate_tests(metafunc):
    if "folder" in metafunc.fixturenames:
        root = Path(metafunc.config.getoption("--golden-dir"))
        found = sorted(path.parent for path in root.glob("drafter*/rounds.npz"))
        metafunc.parametrize("folder", found, ids=[path.name for path in found], scope="session")


def close(found, expected, atol: float = 5e-5) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=atol)


class Runner:
    """A drafter with parameters, and one program for a round: commit features, draft a block."""

    def __init__(self, config: DraftConfig, folder: Path):
        self.config = config
        self.module = abstract(lambda rngs: Drafter(config, dtype=jnp.float32, rngs=rngs))
        with open_checkpoint(folder) as checkpoint:
            self.params = load_params(checkpoint, self.module)

    def cache(self, capacity: int, fill: float = np.nan) -> DraftCache:
        empty = DraftCache.empty(self.config, BATCH, capacity, jnp.float32)
        return jax.tree.map(lambda x: jnp.full_like(x, fill), empty)

    @functools.cached_property
    def program(self):
        def run(params, cache, features, count, length, embeddings):
            drafter = bind(self.module, params)
            place = jnp.full(1, PLACE)
            positions = length + jnp.arange(features.shape[0])
            new = drafter.context_rows(features[None], positions[None])
            cache = DraftCache(
                *append(
                    (cache.keys, cache.values),
                    (new.keys, new.values),
                    place,
                    length[None],
                    count[None],
                )
            )
            lengths = jnp.zeros(BATCH, jnp.int32).at[PLACE].set(length + count)
            batched = jnp.zeros((BATCH, *embeddings.shape)).at[PLACE].set(embeddings)
            hidden = drafter.block(batched, cache, lengths)
            return drafter.context(features), cache, hidden[PLACE]

        return quick_jit(run)

    def round(self, cache, features, length, embeddings, width: int | None = None):
        """Returns context, cache and block states after committing `features` at `length`."""
        count = len(features)
        padded = np.zeros((width or count, features.shape[1]), np.float32)
        padded[:count] = features
        context, cache, hidden = self.program(
            self.params, cache, padded, np.int32(count), np.int32(length), embeddings
        )
        return context[:count], cache, hidden


@functools.cache
def golden_runner(folder: Path) -> Runner:
    return Runner(DraftConfig.from_folder(folder), folder)


@functools.cache
def golden_rounds(folder: Path) -> list[dict[str, np.ndarray]]:
    with np.load(folder / "rounds.npz") as arrays:
        rounds: list[dict[str, np.ndarray]] = []
        while any(key.startswith(f"round{len(rounds)}.") for key in arrays):
            prefix = f"round{len(rounds)}."
            rounds.append({k.removeprefix(prefix): arrays[k] for k in arrays if prefix in k})
    assert rounds
    return rounds


@functools.cache
def golden_target(folder: Path):
    return golden_model(folder.parent / json.loads((folder / "rounds.json").read_text())["target"])


def embedded(folder: Path, ids: np.ndarray) -> np.ndarray:
    return np.asarray(golden_target(folder).params["embed_tokens"])[ids]


@functools.cache
def played(folder: Path, fill: float):
    """Every golden round's context, cache and block states, over a cache filled with `fill`."""
    runner, rounds = golden_runner(folder), golden_rounds(folder)
    cache = runner.cache(int(rounds[-1]["start"]) + 3, fill)
    width = max(len(data["target_hidden"]) for data in rounds)
    results = []
    for data in rounds:
        features = data["target_hidden"]
        length = int(data["start"]) - len(features)
        embeddings = embedded(folder, data["noise_token_ids"])
        results.append(runner.round(cache, features, length, embeddings, width))
        cache = results[-1][1]
    return jax.device_get(results)


def test_golden_rounds(folder):
    head = np.asarray(golden_target(folder).params["lm_head"])
    for data, (context, cache, hidden) in zip(
        golden_rounds(folder), played(folder, np.nan), strict=True
    ):
        start = int(data["start"])
        close(context, data["context"])
        for found, key in ((cache.keys, "cache_keys"), (cache.values, "cache_values")):
            close(found[:, PLACE, :start].transpose(0, 2, 1, 3), data[key])
        close(hidden, data["hidden"])
        close(hidden @ head.T, data["logits"])


def test_both_spellings_describe_one_drafter(folder):
    found = [DraftConfig.from_dict(json.loads(p.read_text())) for p in folder.glob("config*.json")]
    assert found.count(golden_runner(folder).config) == len(found) >= 1


def test_unwritten_cache_rows_do_not_matter(folder):
    """A round's states are the same over NaN and zeros, and rows out of use keep what they held."""
    nan, zeros = played(folder, np.nan), played(folder, 0.0)
    for (_, cache, from_nan), (_, _, from_zeros) in zip(nan, zeros, strict=True):
        np.testing.assert_array_equal(from_nan, from_zeros)
        assert np.isnan(cache.keys[:, 1 - PLACE]).all()
    start = int(golden_rounds(folder)[-1]["start"])
    assert np.isnan(nan[-1][1].values[:, PLACE, start:]).all()


def test_target_taps_are_the_golden_features(folder):
    """Layer ids count from zero: an id names the stream after that layer's MLP."""
    runner, rounds, target = golden_runner(folder), golden_rounds(folder), golden_target(folder)
    with np.load(folder / "rounds.npz") as arrays:
        ids = np.concatenate([arrays["prompt_ids"], arrays["target_ids"]])
    features = np.concatenate([data["target_hidden"] for data in rounds])
    found = target.features_of(ids[: len(features)])
    hidden = target.config.hidden_size
    taps = [target.taps.index(layer) for layer in runner.config.target_layer_ids]
    picked = [found[:, place * hidden : (place + 1) * hidden] for place in taps]
    close(np.concatenate(picked, axis=-1), features, 1e-4)


def test_draft_stage_puts_the_anchor_first(folder):
    """The stage's table is the golden one; another anchor gives another table."""
    data, (_, cache, _) = golden_rounds(folder)[0], played(folder, np.nan)[0]
    runner, target = golden_runner(folder), golden_target(folder)
    anchor, *masks = data["noise_token_ids"]
    assert set(masks) == {runner.config.mask_token_id}
    depth = runner.config.depth
    plan = Plan.tree(depth, depth, runner.config.block_size)
    state = SpecState.empty(
        target.config, runner.config, slots=BATCH, capacity=4, dtype=jnp.float32
    )

    @quick_jit
    def table(target_params, params, state):
        models = Models(bind(target.module, target_params), bind(runner.module, params))
        return draft(models, state, plan)

    def of_anchor(token: int):
        length = np.zeros(BATCH, np.int32)
        length[PLACE] = data["start"]
        anchors = np.full(BATCH, token, np.int32)
        full = dataclasses.replace(state, anchor=anchors, length=length, draft_cache=cache)
        return jax.device_get(table(target.params, runner.params, full))

    found = of_anchor(anchor)
    logits = data["logits"][1:].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    order = np.argsort(-log_probs, axis=-1)[:, : found.token_ids.shape[-1]]
    np.testing.assert_array_equal(found.token_ids[PLACE], order)
    close(found.log_probs[PLACE], np.take_along_axis(log_probs, order, axis=-1))
    other = of_anchor((int(anchor) + 1) % target.config.vocab_size)
    assert np.abs(other.log_probs[PLACE] - found.log_probs[PLACE]).max() > 1e-2


VECTOR_CONFIG = DraftConfig(
    vocab_size=16,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    num_target_layers=9,
    block_size=4,
    mask_token_id=15,
    target_layer_ids=(1, 3, 5),
    windows=(None, None),
    causal=(False, False),
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
)
YARN = RopeConfig(50000.0, 64.0, 32.0, 1.0, 1.0, 1.0, 4096)
LOUD = dataclasses.replace(YARN, attention_factor=1.4158883083359672)


@pytest.fixture(scope="module")
def vector_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    write_shard(folder / "model.safetensors", generated_weights(VECTOR_CONFIG))
    return folder


def test_generator():
    weights = generated_weights(VECTOR_CONFIG)
    close(weights["fc.weight"][0, :3], [0.25485486, -0.00921253, 0.22336178], 5e-9)
    close(weights["hidden_norm.weight"][:3], [1.0414922, 1.0397909, 1.0895960], 6e-8)


@pytest.mark.parametrize(
    ("rope", "start", "rows", "sums", "argmax"),
    [
        pytest.param(
            VECTOR_CONFIG.rope,
            5,
            [
                [-0.09641, 0.61871, -0.40722, -1.84344, 0.67971, -1.41503],
                [0.54872, -0.20893, -1.30810, -0.51836, 0.59768, -2.25984],
            ],
            [-17.6005, -18.5277],
            [[15, 15, 3], [15, 15, 15]],
            id="plain",
        ),
        pytest.param(
            YARN,
            300,
            [
                [1.65553, 0.28515, -1.19979, -0.17855, -0.51510, -0.59982],
                [1.72310, 0.15226, -0.34497, 0.48157, -0.57865, -0.66580],
            ],
            [2.1551, 3.7278],
            [[15, 8, 15], [15, 15, 15]],
            id="yarn",
        ),
        pytest.param(
            LOUD,
            300,
            [
                [1.38574, 0.34723, 1.16376, 0.27345, 0.18897, -0.79102],
                [2.02351, 0.25118, 0.76361, 0.52292, 0.05022, -0.05765],
            ],
            [20.3913, 17.1210],
            [[15, 6, 15], [15, 15, 15]],
            id="yarn-loud",
        ),
    ],
)
def test_check_vectors(vector_folder, rope, start, rows, sums, argmax):
    config = dataclasses.replace(VECTOR_CONFIG, rope=rope)
    runner = Runner(config, vector_folder)
    table = generated("embed_tokens.weight", (16, 32), 1.0)
    features = generated("feats", (start + 2, 96), 2.0)
    cache = runner.cache(start + 2)
    for number, (anchor, first, last) in enumerate(((3, 0, start), (7, start, start + 2))):
        embeddings = table[[anchor, 15, 15, 15]]
        _, cache, hidden = runner.round(cache, features[first:last], first, embeddings, start)
        close(hidden[1, :6], rows[number], 2e-5)
        assert float(hidden.sum()) == pytest.approx(sums[number], abs=1e-3)
        np.testing.assert_array_equal((hidden[1:] @ table.T).argmax(axis=-1), argmax[number])
        expected = block_states(config, generated_weights(config), features[:last], embeddings)
        close(hidden, expected, 2e-5)


def test_layers_with_windows_and_causality(vector_folder):
    """Two layers of different kinds at once, each beside a kind that would give other numbers."""
    pairs = [((3, True), (2, False)), ((2, False), (3, True)), ((None, True), (7, True))]
    table = generated("embed_tokens.weight", (16, 32), 1.0)
    features = generated("feats", (13, 96), 2.0)
    weights = generated_weights(VECTOR_CONFIG)
    results = []
    for first, second in pairs:
        config = dataclasses.replace(
            VECTOR_CONFIG, windows=(first[0], second[0]), causal=(first[1], second[1])
        )
        runner = Runner(config, vector_folder)
        embeddings = table[[3, *[15] * 8]]
        _, _, hidden = runner.round(runner.cache(13), features, 0, embeddings)
        close(hidden, block_states(config, weights, features, embeddings), 2e-5)
        results.append(np.asarray(hidden))
    for i in range(len(results)):
        for j in range(i):
            assert np.abs(results[i] - results[j]).max() > 1e-2


def test_anchor_reaches_every_row(vector_folder):
    runner = Runner(VECTOR_CONFIG, vector_folder)
    table = generated("embed_tokens.weight", (16, 32), 1.0)
    features = generated("feats", (5, 96), 2.0)
    one, other = (
        runner.round(runner.cache(5), features, 0, table[[anchor, 15, 15, 15]])[2]
        for anchor in (3, 4)
    )
    assert (np.abs(np.asarray(one) - np.asarray(other)).max(axis=-1) > 1e-2).all()


def test_far_origin_gives_the_same_block(vector_folder):
    """Rotary scores know differences only; a window keeps the far context as small as the near."""
    window, far = 6, 50_000
    config = dataclasses.replace(
        VECTOR_CONFIG, rope=LOUD, windows=(window, window), causal=(True, True)
    )
    runner = Runner(config, vector_folder)
    table = generated("embed_tokens.weight", (16, 32), 1.0)
    features = generated("feats", (10, 96), 2.0)
    embeddings = table[[3, 15, 15, 15]]
    near, distant = (
        np.asarray(runner.round(runner.cache(far + 10), features, at, embeddings)[2])
        for at in (0, far)
    )
    close(distant, near, 5e-3)
    close(distant, block_states(config, generated_weights(config), features, embeddings), 5e-3)
