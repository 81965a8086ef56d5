"""Text that the small target writes itself: prompts from training documents, continued."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tiny_configs import BOS

from k26jax.model.cache import LatentCache
from k26jax.model.mla import Context
from k26jax.model.parameters import Params, bind
from k26jax.pallas.norm import append
from k26jax.text.tokenizer import Tokenizer

HEAD_TOKENS = 1500


class Prompts(NamedTuple):
    """What to continue; rows are independent.

    token_ids: int32 [n, t], the prompt and then anything.
    lengths: int32 [n], prompt tokens.
    sampled_until: int32 [n], tokens at earlier positions are drawn, later ones are the likeliest.
    temperature: float32 [n].
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    sampled_until: np.ndarray
    temperature: np.ndarray


def document_heads(tokens: np.ndarray, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the first tokens of each document, after the comments and blank lines at its top."""
    heads = []
    starts = np.flatnonzero(tokens == BOS)
    for start, end in itertools.pairwise([*starts, len(tokens)]):
        text = tokenizer.decode(tokens[start:end][:HEAD_TOKENS].tolist())
        lines = text.splitlines(keepends=True)
        body = itertools.dropwhile(lambda line: line.startswith("#") or not line.strip(), lines)
        heads.append(tokenizer.encode("".join(body)))
    return heads


def choose_prompts(
    tokens: np.ndarray, tokenizer: Tokenizer, count: int, length: int, seed: int
) -> Prompts:
    """Returns prompts of 32 to 200 tokens: 60 % heads of documents, 40 % windows from anywhere.

    Half of the heads have [BOS] in front. Of the continuations, 60 % are greedy from the start,
    20 % after 16 to 96 drawn tokens, and 20 % are drawn to the end, at temperature 0.7 to 1.
    """
    rng = np.random.default_rng(seed)
    heads = [head for head in document_heads(tokens, tokenizer) if len(head) >= 40]
    ids = np.zeros((count, length), np.int32)
    lengths = rng.integers(min(32, length // 4), min(200, length // 2), count)
    for row in range(count):
        if rng.random() < 0.6:
            head = heads[rng.integers(len(heads))]
            piece = [BOS, *head] if rng.random() < 0.5 else head
            lengths[row] = min(lengths[row], len(piece))
        else:
            start = rng.integers(len(tokens) - length)
            piece = tokens[start : start + length]
        ids[row, : lengths[row]] = piece[: lengths[row]]
    kind = rng.random(count)
    drawn = np.where(kind < 0.6, 0, np.where(kind < 0.8, rng.integers(16, 96, count), length))
    temperature = rng.uniform(0.7, 1.0, count)
    return Prompts(
        ids,
        lengths.astype(np.int32),
        (lengths + drawn).astype(np.int32),
        temperature.astype(np.float32),
    )


def continue_prompts(module: Any, params: Params, prompts: Prompts, key: jax.Array) -> jax.Array:
    """Returns the prompts continued to the full width, int32 [n, t]; jit it with module bound.

    One token a step through the package's cached forward pass, prompts included.
    """
    target = bind(module, params)
    count, length = prompts.token_ids.shape
    slots = jnp.arange(count)
    alone = jnp.ones((count, 1, 1), jnp.uint32)

    def body(carry: tuple, position: jax.Array) -> tuple[tuple, jax.Array]:
        token, cache = carry
        lengths = jnp.full(count, position, jnp.int32)
        rows = target.forward(
            token[:, None],
            lengths[:, None],
            Context(cache, slots, lengths, alone),
            valid=jnp.ones((count, 1), bool),
        )
        ones = jnp.ones(count, jnp.int32)
        old, new = (cache.c_kv, cache.k_pe), (rows.c_kv, rows.k_pe)
        cache = LatentCache(*append(old, new, slots, lengths, ones))
        logits = target.logits(rows.hidden[:, 0])
        noise = jax.random.gumbel(jax.random.fold_in(key, position), logits.shape)
        draws = position + 1 < prompts.sampled_until
        noise = jnp.where(draws[:, None], noise * prompts.temperature[:, None], 0.0)
        chosen = jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
        given = prompts.token_ids[:, jnp.minimum(position + 1, length - 1)]
        following = jnp.where(position + 1 < prompts.lengths, given, chosen)
        return (following, cache), following

    cache = LatentCache.empty(target.config, count, length, target.dtype)
    first = jnp.asarray(prompts.token_ids)[:, 0]
    _, rest = lax.scan(body, (first, cache), jnp.arange(length - 1))
    return jnp.concatenate([first[:, None], rest.T], axis=1)
