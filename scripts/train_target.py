"""Trains the small target on token files and exports it as Kimi K2.6 is published.

`python scripts/train_target.py --data .train --out checkpoints/k26-tiny` (needs a GPU to finish in
minutes). Quantization-aware: the routed experts are INT4 in every forward pass.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny_configs import BOS, END_OF_TURN, EOS, PAD, target_config
from training_common import (
    Clock,
    apply,
    float32,
    optimizer,
    published_tensors,
    schedule,
    write_checkpoint,
    write_json,
)
from training_model import (
    TrainingTarget,
    choose_attention,
    fake_quantized,
    training_config,
    with_experts,
)

from k26jax.checkpoint.int4 import quantize_int4
from k26jax.checkpoint.load import load_params
from k26jax.checkpoint.reader import PREFIX, open_checkpoint
from k26jax.config import ModelConfig
from k26jax.model.parameters import Params, abstract, arrays, bind
from k26jax.model.target import Target
from k26jax.text.tokenizer import load_tokenizer

LONG_FROM = 0.8
BIAS_RATE = 1e-3
BEGUN = time.monotonic()


def initial_params(config: ModelConfig, seed: int) -> Params:
    """Returns float32 parameters; the projections that write to the residual start small."""
    params = arrays(TrainingTarget(training_config(config), dtype=jnp.float32, rngs=nnx.Rngs(seed)))

    def shrink(path: Any, leaf: jax.Array) -> jax.Array:
        name = ".".join(str(part.key) for part in path)
        if name.endswith("e_score_correction_bias"):
            return jnp.zeros_like(leaf)
        return leaf * 0.3 if "o_proj" in name or "down_proj" in name else leaf

    return float32(jax.tree_util.tree_map_with_path(shrink, params))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the negative log-likelihood of each label, nats."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def training_step(module: TrainingTarget, attention: str, batch: int, length: int) -> Any:
    """Returns the jitted step (params, optimizer state, data, key, step, rate, bias rate)."""
    rule = optimizer()

    def loss_of(params: Params, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
        target = bind(module, fake_quantized(params))
        out = target.run(windows[:, :-1], attention)
        return cross_entropy(target.logits(out.hidden), windows[:, 1:]).mean(), out.loads

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, state: Any, data: jax.Array, key: Any, step: Any, rate: Any, bias: Any
    ):
        starts = jax.random.randint(
            jax.random.fold_in(key, step), (batch,), 0, data.shape[0] - length
        )
        windows = data[starts[:, None] + jnp.arange(length + 1)].astype(jnp.int32)
        (loss, loads), grads = jax.value_and_grad(loss_of, has_aux=True)(params, windows)
        updates, state = rule.update(grads, state, params)
        params = apply(params, updates, rate)
        share = loads / loads.mean(axis=-1, keepdims=True)
        moe = params["moe"]
        moved = moe["e_score_correction_bias"] + bias * jnp.sign(1.0 - share)
        params = {**params, "moe": {**moe, "e_score_correction_bias": moved}}
        return params, state, loss, share.max()

    return step


def evaluate(module: Any, params: Params, tokens: np.ndarray, forward: Any, length: int) -> float:
    """Returns the total nats of all tokens but the first, in windows of `length`, 4 at a time."""

    @jax.jit
    def total(params: Params, windows: jax.Array) -> jax.Array:
        target = bind(module, params)
        ids, labels = jnp.maximum(windows[:, :-1], 0), windows[:, 1:]
        losses = cross_entropy(target.logits(forward(target, ids)), jnp.maximum(labels, 0))
        return jnp.where(labels >= 0, losses, 0.0).sum()

    n = -(-(len(tokens) - 1) // length)
    padded = np.full(-(-n // 4) * 4 * length + 1, -1, np.int32)
    padded[: len(tokens)] = tokens
    windows = np.stack([padded[i * length : (i + 1) * length + 1] for i in range(-(-n // 4) * 4)])
    return sum(float(total(params, windows[i : i + 4])) for i in range(0, len(windows), 4))


def export(folder: Path, params: Params) -> int:
    """Writes the published form of trained parameters; returns the folder's bytes."""
    published = target_config()
    config = ModelConfig.from_dict(published)
    module = abstract(lambda rngs: Target(config, dtype=jnp.bfloat16, rngs=rngs))
    host = jax.tree.map(np.asarray, params)

    def pack(leaf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        packed, scale = quantize_int4(leaf["weight"])
        return {"weight_packed": packed, "weight_scale": scale}

    tensors = published_tensors(module, with_experts(host, pack), PREFIX)
    shapes = {
        name.replace("_packed", "_shape"): np.array([t.shape[0], t.shape[1] * 8], np.int32)
        for name, t in tensors.items()
        if name.endswith("weight_packed")
    }
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": BOS, "eos_token_id": [EOS, END_OF_TURN], "pad_token_id": PAD}
    write_json(folder / "generation_config.json", ends)
    return write_checkpoint(folder, published, dict(sorted((tensors | shapes).items())))


def train(args: argparse.Namespace, module: TrainingTarget, config: ModelConfig) -> Params:
    """Returns the trained parameters; writes the folder as it goes."""
    attention = choose_attention(args.attention)
    params = initial_params(config, args.seed)
    print("parameters", sum(leaf.size for leaf in jax.tree.leaves(params)), attention, flush=True)
    state = jax.jit(optimizer().init)(params)
    data = jnp.asarray(np.load(args.data / "train.npy"))
    heldout = np.load(args.data / "heldout.npy")[: args.batch * 1024].astype(np.int32)
    key = jax.random.key(args.seed)
    short, long = (
        training_step(module, attention, batch, length)
        for batch, length in ((args.batch, args.length), (args.batch // 4, args.length * 4))
    )
    quantize = jax.jit(fake_quantized)

    def forward(target: TrainingTarget, ids: jax.Array) -> jax.Array:
        return target.run(ids, attention).hidden

    nothing = (np.int32(0), np.float32(0), np.float32(0))
    short, long = (run.lower(params, state, data, key, *nothing).compile() for run in (short, long))
    print(f"compiled after {time.monotonic() - BEGUN:.0f} s", flush=True)
    clock = Clock(args.steps, args.minutes, BEGUN)
    step, seen, last_print, last_save = 0, 0, 0.0, 0.0
    while (progress := clock.progress(step)) < 1:
        rate = args.rate * schedule(progress)
        run = long if progress >= LONG_FROM else short
        bias = BIAS_RATE * min(1.0, 2 * schedule(progress))
        now = (np.int32(step), np.float32(rate), np.float32(bias))
        params, state, loss, most = run(params, state, data, key, *now)
        step, seen = step + 1, seen + args.batch * args.length
        if step % 10 == 0:
            loss.block_until_ready()
        if step == 1 or clock.seconds - last_print > args.print_every:
            last_print = clock.seconds
            speed = seen / clock.seconds
            print(
                f"step {step} tokens {seen / 1e6:.1f}M progress {progress:.3f} "
                f"loss {loss:.4f} max load {most:.2f} tokens/s {speed:.0f}",
                flush=True,
            )
        if clock.seconds - last_save > args.save_every:
            last_save = clock.seconds
            export(args.out, params)
            stored = quantize(params)
            nats = evaluate(module, stored, heldout, forward, args.length)
            print(f"step {step} held-out loss {nats / (len(heldout) - 1):.4f}", flush=True)
    print(f"trained {step} steps, {seen / 1e6:.1f}M tokens, {clock.seconds:.0f} s", flush=True)
    return params


def report(folder: Path, data: Path, tokenizer_folder: Path, length: int) -> None:
    """Prints held-out bits per byte of the exported folder, in float32, through the package."""
    config = ModelConfig.from_folder(folder)
    module = abstract(lambda rngs: Target(config, dtype=jnp.float32, rngs=rngs))
    params = load_params(open_checkpoint(folder), module)
    tokens = np.load(data / "heldout.npy").astype(np.int32)

    def forward(target: Target, ids: jax.Array) -> jax.Array:
        batch, width = ids.shape
        positions = jnp.broadcast_to(jnp.arange(width), ids.shape)
        visible = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
        return target.forward_expanded(ids, positions, visible)[0]

    nats = evaluate(module, params, tokens, forward, length)
    tokenizer = load_tokenizer(tokenizer_folder)
    text_bytes = len(tokenizer.visible_bytes(tokens.tolist()))
    print(
        f"exported: held-out loss {nats / (len(tokens) - 1):.4f} nats per token, "
        f"{nats / np.log(2) / text_bytes:.4f} bits per byte ({text_bytes} bytes)",
        flush=True,
    )


def main() -> None:
    """Trains, exports and reports."""
    parser = argparse.ArgumentParser(description="Trains the small target.")
    parser.add_argument("--data", type=Path, default=Path(".train"))
    parser.add_argument("--out", type=Path, default=Path("checkpoints/k26-tiny"))
    parser.add_argument("--tokenizer", type=Path, default=Path("checkpoints/k26-tiny"))
    parser.add_argument("--steps", type=int, default=5600)
    parser.add_argument("--minutes", type=float, default=60.0, help="all but the report")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", choices=("auto", "cudnn", "package"), default="auto")
    parser.add_argument("--print-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds")
    args = parser.parse_args()
    config = ModelConfig.from_dict(target_config())
    floating = training_config(config)
    module = abstract(lambda rngs: TrainingTarget(floating, dtype=jnp.bfloat16, rngs=rngs))
    params = train(args, module, config)
    print("exported", export(args.out, params), "bytes", flush=True)
    report(args.out, args.data, args.tokenizer, args.length * 4)


if __name__ == "__main__":
    main()
