"""The DFlash drafter in NumPy, from its description alone, and the weights of its check vectors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from k26jax.config import DraftConfig

_MASK = (1 << 64) - 1


def generated(name: str, shape: tuple[int, ...], scale: float, offset: float = 0.0) -> np.ndarray:
    """Float32 values that depend on the tensor's name and the element's number only."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 & _MASK
    index = np.arange(int(np.prod(shape)), dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = np.uint64(seed) + index * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    unit = (x >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5
    return (offset + scale * unit).astype(np.float32).reshape(shape)


def shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a published drafter file."""
    hidden, head = config.hidden_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    tensors = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (config.intermediate_size, hidden),
            "mlp.up_proj": (config.intermediate_size, hidden),
            "mlp.down_proj": (hidden, config.intermediate_size),
        }.items():
            tensors[f"layers.{layer}.{name}.weight"] = shape
    return tensors


def generated_weights(config: DraftConfig) -> dict[str, np.ndarray]:
    """All tensors of a drafter; norms around 1."""
    return {
        name: generated(name, shape, 0.2, 1.0) if len(shape) == 1 else generated(name, shape, 0.6)
        for name, shape in shapes(config).items()
    }


def visible(start: int, rows: int, window: int | None, causal: bool) -> np.ndarray:
    """bool [rows, start + rows]: which context and block positions each block row sees."""
    seen = np.zeros((rows, start + rows), bool)
    for row in range(rows):
        for k in range(start + rows):
            q = start + row
            near = window is None or (q - k < window and (causal or k - q < window))
            seen[row, k] = (not causal or k <= q) and near
    return seen


def block_states(
    config: DraftConfig,
    weights: Mapping[str, np.ndarray],
    features: np.ndarray,
    embeddings: np.ndarray,
    shift: int = 0,
) -> np.ndarray:
    """Final-normed states [block, hidden] after the context `features` [start, n * hidden].

    shift: added to all positions.
    """
    start, rows = features.shape[0], embeddings.shape[0]
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    context = _norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], config.rms_norm_eps)
    positions = shift + np.arange(start + rows)
    x = embeddings.astype(np.float64)
    for layer in range(config.num_hidden_layers):

        def weight(name: str, layer=layer) -> np.ndarray:
            return w[f"layers.{layer}.{name}.weight"]

        normed = _norm(x, weight("input_layernorm"), config.rms_norm_eps)
        both = np.concatenate([context, normed])
        heads = (-1, config.num_attention_heads, config.head_dim)
        kv_heads = (-1, config.num_key_value_heads, config.head_dim)
        query = (normed @ weight("self_attn.q_proj").T).reshape(heads)
        key = (both @ weight("self_attn.k_proj").T).reshape(kv_heads)
        value = (both @ weight("self_attn.v_proj").T).reshape(kv_heads)
        query = _norm(query, weight("self_attn.q_norm"), config.rms_norm_eps)
        key = _norm(key, weight("self_attn.k_norm"), config.rms_norm_eps)
        query = _rotate(config, query, positions[start:])
        key = _rotate(config, key, positions)
        seen = visible(start, rows, config.windows[layer], config.causal[layer])
        attended = grouped_attention(query, key, value, seen, config.head_dim**-0.5)
        x = x + attended.reshape(rows, -1) @ weight("self_attn.o_proj").T
        normed = _norm(x, weight("post_attention_layernorm"), config.rms_norm_eps)
        gate, up = normed @ weight("mlp.gate_proj").T, normed @ weight("mlp.up_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight("mlp.down_proj").T
    return _norm(x, w["norm.weight"], config.rms_norm_eps)


def grouped_attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, seen: np.ndarray, scale: float
) -> np.ndarray:
    """[t, h, e] of queries [t, h, e], keys and values [s, n, e] and seen [t, s]; head by head."""
    out = np.empty(query.shape)
    per_key_head = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        k, v = key[:, head // per_key_head], value[:, head // per_key_head]
        for row in range(query.shape[0]):
            picked = seen[row]
            scores = scale * (k[picked] @ query[row, head])
            share = np.exp(scores - scores.max())
            out[row, head] = share @ v[picked] / share.sum()
    return out


def _norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain


def _rotate(config: DraftConfig, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    frequencies = config.rope.inv_freq(config.head_dim).astype(np.float64)
    angles = np.concatenate([positions[:, None] * frequencies] * 2, axis=-1)[:, None]
    half = config.head_dim // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return config.rope.amplitude * (x * np.cos(angles) + turned * np.sin(angles))
