"""A request's settings as rows of the device's records, made on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from k26jax.config import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_IDS
from k26jax.engine.request import Request, SamplingParams
from k26jax.spec.adjust import Adjustments
from k26jax.spec.state import Sampling, seed_words


def host_array(value: Any, dtype: Any) -> Any:
    """Returns a host array; a compiled program takes it where its records name device arrays."""
    return np.asarray(value, dtype)


def sampling_row(request: Request | None) -> Sampling:
    """Returns how a request chooses tokens, one row; greedy without one."""
    stop_ids = np.full((1, MAX_STOP_IDS), -1, np.int32)
    params = request.params if request else SamplingParams(temperature=0)
    if request:
        stop_ids[0, : len(request.stop_ids)] = request.stop_ids
    return Sampling(
        temperature=host_array([params.temperature], np.float32),
        top_k=host_array([max(params.top_k, 0)], np.int32),
        top_p=host_array([params.top_p], np.float32),
        min_p=host_array([params.min_p], np.float32),
        seed=host_array(seed_words(request.seed if request else 0)[None], np.uint32),
        stop_ids=host_array(stop_ids, np.int32),
        tells_log_probs=host_array([params.logprobs is not None], np.bool_),
    )


def adjustments_row(request: Request, vocab_size: int) -> Adjustments:
    """Returns what a request changes of its logits before anything is emitted, one row."""
    params, prompt = request.params, request.prompt_token_ids
    bias = np.zeros((1, vocab_size), np.float32)
    for token, value in params.biases.items():
        bias[0, token] = value
    in_prompt = np.zeros((1, vocab_size), bool)
    in_prompt[0, list(prompt)] = True
    bad_words = np.full((1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for place, word in enumerate(request.bad_words):
        bad_words[0, place, : len(word)] = word[::-1]
    frequency = params.frequency_penalty
    # As large as float32 goes: a penalty too small to be seen.
    inverse = np.clip(1 / frequency, -3e38, 3e38) if frequency else np.inf
    return Adjustments(
        is_on=host_array([True], np.bool_),
        bias=host_array(bias, np.float32),
        repetition=host_array([params.repetition_penalty], np.float32),
        repetition_inverse=host_array([1 / params.repetition_penalty], np.float32),
        frequency_inverse=host_array([inverse], np.float32),
        presence=host_array([params.presence_penalty], np.float32),
        in_prompt=host_array(in_prompt, np.bool_),
        counts=host_array(np.zeros((1, vocab_size)), np.int32),
        recent=host_array(np.full((1, MAX_BAD_WORD_TOKENS - 1), -1), np.int32),
        bad_words=host_array(bad_words, np.int32),
        stop_from=host_array([len(prompt) + params.min_tokens], np.int32),
    )
