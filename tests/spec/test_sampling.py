"""Choosing tokens: filters against NumPy, noise by position, and the law of sampled text."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.pairs import Ask, tiny_programs
from hypothesis import given
from hypothesis import strategies as st

from k26jax.config import MAX_STOP_IDS
from k26jax.spec.accept import cut_at_stop
from k26jax.spec.plan import Plan
from k26jax.spec.sampling import choose, gumbel
from k26jax.spec.state import Sampling, seed_words

WIDTH = 12


def _sampling(rows: int, **settings) -> Sampling:
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    kinds = {"top_k": np.int32}
    columns = {
        name: jnp.full(rows, value, kinds.get(name, np.float32)) for name, value in plain.items()
    }
    seed = jnp.stack([jnp.asarray(seed_words(row)) for row in range(rows)])
    stop_ids = jnp.full((rows, MAX_STOP_IDS), -1, jnp.int32)
    tells = jnp.zeros(rows, bool)
    return Sampling(**columns, seed=seed, stop_ids=stop_ids, tells_log_probs=tells)


_choose = jax.jit(choose, static_argnums=4)


def _kept(logits, *, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The tokens a distribution keeps, the slow way, in float64."""
    probability = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = np.argsort(-probability, kind="stable")
    kept = np.zeros(len(logits), bool)
    kept[order[: top_k or len(order)]] = True
    probability = np.where(kept, probability, 0)
    probability /= probability.sum()
    before = 0.0
    for token in order:
        if before >= top_p:
            kept[token] = False
        before += probability[token]
    kept[order[0]] = True
    return kept & (probability >= min_p * probability.max())


@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 2, 5, WIDTH, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_filters_keep_what_numpy_keeps(seed, temperature, top_k, top_p, min_p):
    """The choice is the largest of logits / temperature + noise among the kept tokens."""
    rng = np.random.default_rng(seed)
    rows = 4
    logits = rng.normal(size=(rows, 3, WIDTH)).astype(np.float32) * 3
    base = jnp.asarray(rng.integers(0, 1000, rows), jnp.int32)
    offset = jnp.asarray(rng.integers(0, 3, (rows, 3)), jnp.int32)
    settings = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling = _sampling(rows, temperature=temperature, **settings)
    chosen = np.asarray(_choose(jnp.asarray(logits), base, offset, sampling, 2))
    noise = np.asarray(gumbel(sampling.seed, base, 2, WIDTH))
    for row, column in itertools.product(range(rows), range(3)):
        kept = _kept(logits[row, column], temperature=temperature, **settings)
        noisy = logits[row, column] / np.float32(temperature) + noise[row, offset[row, column]]
        assert chosen[row, column] == np.argmax(np.where(kept, noisy, -np.inf))


def test_temperature_zero_takes_the_lowest_id_of_equal_logits():
    logits = jnp.zeros((1, 1, WIDTH)).at[0, 0, jnp.array([3, 7])].set(1.0)
    zero = jnp.zeros((1, 1), jnp.int32)
    assert int(_choose(logits, jnp.zeros(1, jnp.int32), zero, _sampling(1), 0)[0, 0]) == 3


def test_noise_depends_on_seed_and_position_alone():
    """One position asked for from two bases is one draw; neighbours and seeds differ."""
    seeds = jnp.asarray(np.stack([seed_words(5), seed_words(5), seed_words(5 + 2**40)]))
    noise = np.asarray(gumbel(seeds, jnp.array([10, 12, 10], jnp.int32), 4, 50))
    np.testing.assert_array_equal(noise[0, 2:], noise[1, :3])
    assert np.abs(noise[0] - noise[2]).max() > 0.1
    assert np.abs(noise[0, 0] - noise[0, 1]).max() > 0.1


def test_negative_and_large_seeds_are_words():
    np.testing.assert_array_equal(seed_words(-1), [0xFFFFFFFF, 0xFFFFFFFF])
    np.testing.assert_array_equal(seed_words(2**32 + 7), [1, 7])


@given(
    runs=st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=3),
    limits=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    stops=st.lists(st.integers(0, 5), max_size=2),
)
def test_a_stop_id_counts_and_nothing_after_it(runs, limits, stops):
    """Bug log 43: a stop before the limit wins, one beyond it does not."""
    padded = np.full((len(runs), MAX_STOP_IDS), -1, np.int32)
    padded[:, : len(stops)] = stops
    limit = jnp.asarray(limits[: len(runs)], jnp.int32)
    found = cut_at_stop(jnp.asarray(runs, jnp.int32), limit, jnp.asarray(padded))
    for row, run in enumerate(runs):
        want, stopped = limits[row], False
        for index, token in enumerate(run[: limits[row]]):
            if token in stops:
                want, stopped = index + 1, True
                break
        assert (int(found[0][row]), bool(found[1][row])) == (want, stopped)


@functools.lru_cache
def _law(temperature: float):
    """Exact probabilities of the first three tokens of the tiny model, [w, w, w] in float64."""
    programs = tiny_programs(slots=64)
    params = programs.random_params(7)
    width = programs.model.vocab_size
    prompt = [1, 4, 2]
    sequences = [
        [*prompt, *tail] for n in range(3) for tail in itertools.product(range(width), repeat=n)
    ]
    longest = max(map(len, sequences))
    ids = np.zeros((len(sequences), longest), np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence

    @jax.jit
    def run(params, ids, last):
        target = programs.models(params).target
        visible = jnp.tril(jnp.ones((longest, longest), bool))[None]
        hidden, _ = target.forward_expanded(ids, jnp.arange(longest)[None], visible)
        return target.logits(hidden[jnp.arange(len(ids)), last])

    last = np.array([len(sequence) - 1 for sequence in sequences])
    logits = np.asarray(run(params, ids, last), np.float64) / temperature
    probability = np.exp(logits - logits.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    first, second = probability[0], probability[1 : 1 + width]
    third = probability[1 + width :].reshape(width, width, width)
    return first[:, None, None] * second[:, :, None] * third


@pytest.mark.parametrize(
    ("temperature", "plan"),
    [
        pytest.param(0.6, Plan.tree(24, 4, 5), marks=pytest.mark.slow),
        (1.0, Plan.chain(4, 5)),
        (1.5, Plan.tree(6, 4, 5)),
    ],
    ids=str,
)
def test_sampled_tokens_follow_the_targets_law(temperature, plan):
    """Invariant 2, second half, T4, T5: chi-square of three tokens over 3,840 seeds."""
    programs = tiny_programs(slots=64)
    params = programs.random_params(7)
    law = _law(temperature)
    counts = np.zeros(law.shape)
    for batch in range(60):
        seeds = range(64 * batch, 64 * batch + 64)
        asks = [Ask((1, 4, 2), max_tokens=3, temperature=temperature, seed=s) for s in seeds]
        state, first = _admit_all(programs, params, asks)
        _, steps = jax.device_get(programs.steps(plan)(params, state, 3))
        for slot in range(64):
            tokens = [first[slot]]
            for step in range(steps.n_run):
                tokens += steps.tokens[step, slot, : steps.emitted_len[step, slot]].tolist()
            counts[tuple(tokens)] += 1
    draws = counts.sum()
    expected = law * draws
    common = expected >= 5
    table = [(counts[common], expected[common])]
    table.append((counts[~common].sum(keepdims=True), expected[~common].sum(keepdims=True)))
    chi_square = sum(((c - e) ** 2 / e).sum() for c, e in table if e.size and e.sum() > 0)
    freedom = common.sum()
    # The statistic's mean is `freedom` and its variance twice that; 4 sigmas is p < 1e-4.
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)
    assert freedom > 8


def _admit_all(programs, params, asks):
    """One prompt in all slots: prefilled once, then copied, with each slot's own first token."""
    import dataclasses

    state, _ = programs.admit(params, [asks[0]])
    stack = [ask.sampling() for ask in asks]
    sampling = jax.tree.map(lambda *rows: jnp.concatenate(rows), *stack)

    @jax.jit
    def spread(params, state, sampling):
        copy = lambda x: jnp.broadcast_to(x[:, :1], x.shape)  # noqa: E731
        cache, draft_cache = jax.tree.map(copy, (state.cache, state.draft_cache))
        target = programs.models(params).target
        ids = jnp.asarray([asks[0].prompt])
        n = ids.shape[1]
        visible = jnp.tril(jnp.ones((n, n), bool))[None]
        hidden, _ = target.forward_expanded(ids, jnp.arange(n)[None], visible)
        logits = jnp.broadcast_to(target.logits(hidden[:, -1:]), (64, 1, programs.model.vocab_size))
        base = jnp.full(64, n - 1, jnp.int32)
        first = choose(logits, base, jnp.zeros((64, 1), jnp.int32), sampling, 0)[:, 0]
        return dataclasses.replace(
            state,
            cache=cache,
            draft_cache=draft_cache,
            anchor=first,
            length=jnp.full(64, n, jnp.int32),
            remaining=jnp.full(64, 2, jnp.int32),
            sampling=sampling,
        )

    cached = programs.__dict__.setdefault("spread", spread)
    state = cached(params, state, sampling)
    return state, dict(enumerate(np.asarray(state.anchor).tolist()))
