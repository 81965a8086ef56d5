"""Trains the small target's DFlash drafter on text that the target writes itself.

`python scripts/train_drafter.py --data .train --target checkpoints/k26-tiny --out
checkpoints/k26-tiny-dflash` (needs a GPU to finish in minutes).
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from target_text import Prompts, choose_prompts, continue_prompts
from tiny_configs import drafter_config
from training_common import (
    Clock,
    apply,
    float32,
    optimizer,
    published_tensors,
    schedule,
    write_checkpoint,
)
from training_drafter import TrainingDrafter
from training_model import TrainingTarget, choose_attention, load_for_training

from k26jax.config import DraftConfig
from k26jax.model.cache import DraftCache
from k26jax.model.drafter import Drafter
from k26jax.model.parameters import Params, abstract, arrays, bind
from k26jax.text.tokenizer import load_tokenizer

BEGUN = time.monotonic()
DECAY = 4.0
NEAR = 192
ONE_FILE = 1 << 30


def check_blocks(config: DraftConfig, params: Params) -> float:
    """Returns the greatest difference between the training form and `Drafter.block`, float32."""
    plain = bind(abstract(lambda r: Drafter(config, dtype=jnp.float32, rngs=r)), params)
    dense = bind(abstract(lambda r: TrainingDrafter(config, dtype=jnp.float32, rngs=r)), params)
    rng = np.random.default_rng(0)
    length, anchors = 40, np.array([[11, 32], [29, 7]])
    width = config.hidden_size
    features = rng.normal(size=(2, length, width * len(config.target_layer_ids))).astype(np.float32)
    embeddings = rng.normal(size=(2, 2, config.block_size, width)).astype(np.float32)
    got = dense.blocks(jnp.asarray(embeddings), jnp.asarray(features), jnp.asarray(anchors))
    positions = jnp.broadcast_to(jnp.arange(length), (2, length))
    rows = plain.context_rows(jnp.asarray(features), positions)
    worst = 0.0
    for block in range(2):
        cache = DraftCache(rows.keys, rows.values)
        want = plain.block(jnp.asarray(embeddings[:, block]), cache, jnp.asarray(anchors[:, block]))
        worst = max(worst, float(jnp.abs(want - got[:, block]).max()))
    return worst


def block_losses(
    models: tuple[TrainingTarget, TrainingDrafter],
    token_ids: jax.Array,
    anchors: jax.Array,
    attention: str,
) -> tuple[jax.Array, jax.Array]:
    """Returns each drafted position's loss and whether its likeliest token is right, [b, a, j]."""
    target, drafter = models
    config = drafter.config
    outputs = target.run(token_ids, attention).outputs
    features = jnp.concatenate([outputs[layer] for layer in config.target_layer_ids], axis=-1)
    offsets = anchors[..., None] + jnp.arange(config.block_size)
    block = jnp.take_along_axis(token_ids[:, None], offsets, axis=-1)
    masked = block.at[..., 1:].set(config.mask_token_id)
    states = drafter.blocks(target.embed(masked), jax.lax.stop_gradient(features), anchors)
    logits, labels = target.logits(states[..., 1:, :]), block[..., 1:]
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked, jnp.argmax(logits, axis=-1) == labels


def training_step(
    modules: tuple[TrainingTarget, TrainingDrafter], args: argparse.Namespace, attention: str
) -> Any:
    """Returns the jitted step (params, optimizer state, target params, text, starts, key, ...)."""
    rule = optimizer()
    size = modules[1].config.block_size
    weights = jnp.exp(-jnp.arange(size - 1) / DECAY)

    def loss_of(params: Params, frozen: Params, ids: jax.Array, anchors: jax.Array) -> Any:
        models = (bind(modules[0], frozen), bind(modules[1], params))
        losses, right = block_losses(models, ids, anchors, attention)
        return (losses * weights).mean() / weights.mean(), right.mean(axis=(0, 1))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, state: Any, frozen: Params, text: Any, starts: Any, key: Any,
        number: Any, rate: Any,
    ) -> tuple[Params, Any, jax.Array, jax.Array]:  # fmt: skip
        rows, near, where = jax.random.split(jax.random.fold_in(key, number), 3)
        picked = jax.random.randint(rows, (args.batch,), 0, text.shape[0])
        ids, first = text[picked].astype(jnp.int32), starts[picked][:, None]
        # Half of the anchors lie near the prompt, where short answers are.
        last = text.shape[1] - size
        shape = (args.batch, args.anchors)
        is_near = jax.random.bernoulli(near, 0.5, shape)
        span = jnp.where(is_near, jnp.minimum(NEAR, last - first), last - first)
        anchors = first + (jax.random.uniform(where, shape) * span).astype(jnp.int32)
        (loss, right), grads = jax.value_and_grad(loss_of, has_aux=True)(
            params, frozen, ids, anchors
        )
        updates, state = rule.update(grads, state, params)
        return apply(params, updates, rate), state, loss, right

    return step


def write_text(
    module: TrainingTarget, params: Params, prompts: Prompts, args: argparse.Namespace
) -> np.ndarray:
    """Returns the target's continuations, uint16 [n, t]; stops early at --generate-minutes."""
    run = jax.jit(lambda p, some, key: continue_prompts(module, p, some, key))
    done, chunk = [], min(args.generate_batch, len(prompts.lengths))
    begun = time.monotonic()
    for first in range(0, len(prompts.lengths) - chunk + 1, chunk):
        some = Prompts(*(field[first : first + chunk] for field in prompts))
        ids = run(params, some, jax.random.key(args.seed * 1000 + first))
        done.append(np.asarray(ids).astype(np.uint16))
        seconds = time.monotonic() - begun
        print(f"wrote {first + chunk} sequences, {seconds:.0f} s", flush=True)
        if seconds > 60 * args.generate_minutes:
            break
    return np.concatenate(done)


def heldout_prompts(path: Path, tokenizer: Any, length: int) -> Prompts:
    """Returns the held-out prompts, to be continued greedily."""
    lines = path.read_text(encoding="utf-8").splitlines()
    ids = [tokenizer.encode(json.loads(line)["prompt"])[: length // 2] for line in lines]
    table = np.zeros((len(ids), length), np.int32)
    for row, prompt in enumerate(ids):
        table[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in ids], np.int32)
    return Prompts(table, lengths, np.zeros_like(lengths), np.ones(len(ids), np.float32))


def train(args: argparse.Namespace) -> None:
    """Writes the target's text, trains on it, and exports the drafter as it goes."""
    published = drafter_config()
    config = DraftConfig.from_dict(published)
    params = float32(arrays(TrainingDrafter(config, dtype=jnp.float32, rngs=nnx.Rngs(args.seed))))
    print(f"training form differs by {check_blocks(config, params):.2e} from Drafter.block")
    # XLA's CPU backend lacks some of the bfloat16 products.
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    attention = choose_attention(args.attention)
    target, frozen = load_for_training(args.target, dtype)
    tokenizer = load_tokenizer(args.tokenizer)
    heldout = heldout_prompts(args.prompts, tokenizer, args.length)
    heldout_text = write_text(target, frozen, heldout, args)
    print("held-out example:", tokenizer.decode(heldout_text[1].tolist()), flush=True)
    tokens = np.load(args.data / "train.npy", mmap_mode="r")[: args.tokens]
    prompts = choose_prompts(tokens, tokenizer, args.sequences, args.length, args.seed)
    print(f"prompts chosen after {time.monotonic() - BEGUN:.0f} s", flush=True)
    text = write_text(target, frozen, prompts, args)
    starts = jnp.asarray(prompts.lengths[: len(text)])
    module = abstract(lambda rngs: TrainingDrafter(config, dtype=dtype, rngs=rngs))
    stored = abstract(lambda rngs: Drafter(config, dtype=jnp.bfloat16, rngs=rngs))

    def save(params: Params) -> int:
        host = jax.tree.map(np.asarray, params)
        return write_checkpoint(args.out, published, published_tensors(stored, host), ONE_FILE)

    @jax.jit
    def judge(params: Params, ids: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        anchors = first[:, None] + jnp.arange(min(120, args.length // 4))
        models = (bind(target, frozen), bind(module, params))
        _, right = block_losses(models, ids.astype(jnp.int32), anchors, attention)
        return right.mean(axis=(0, 1)), 1 + jnp.cumprod(right, axis=-1).sum(-1).mean()

    state = jax.jit(optimizer().init)(params)
    run = training_step((target, module), args, attention)
    data = (frozen, jnp.asarray(text), starts, jax.random.key(args.seed))
    run = run.lower(params, state, *data, np.int32(0), np.float32(0)).compile()
    clock = Clock(args.steps, args.minutes, BEGUN)
    step, last_print, last_save = 0, 0.0, 0.0
    print(f"compiled after {time.monotonic() - BEGUN:.0f} s", flush=True)
    while (progress := clock.progress(step)) < 1:
        rate = np.float32(args.rate * schedule(progress))
        params, state, loss, right = run(params, state, *data, np.int32(step), rate)
        step += 1
        if step % 10 == 0:
            loss.block_until_ready()
        if step == 1 or clock.seconds - last_print > args.print_every:
            last_print = clock.seconds
            shown = " ".join(f"{x:.3f}" for x in np.asarray(right))
            print(f"step {step} progress {progress:.3f} loss {loss:.4f} right {shown}", flush=True)
        if clock.seconds - last_save > args.save_every:
            last_save = clock.seconds
            save(params)
            right, chain = judge(params, heldout_text, heldout.lengths)
            shown = " ".join(f"{x:.3f}" for x in np.asarray(right))
            print(f"step {step} held-out prompts: right {shown} chain {chain:.3f}", flush=True)
    print(f"trained {step} steps, {clock.seconds:.0f} s; exported {save(params)} bytes", flush=True)
    right, chain = judge(params, heldout_text, heldout.lengths)
    print(f"held-out prompts: right {np.asarray(right).round(3)} chain {chain:.3f}", flush=True)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Trains the small target's drafter.")
    parser.add_argument("--data", type=Path, default=Path(".train"))
    parser.add_argument("--target", type=Path, default=Path("checkpoints/k26-tiny"))
    parser.add_argument("--tokenizer", type=Path, default=Path("checkpoints/k26-tiny"))
    parser.add_argument("--out", type=Path, default=Path("checkpoints/k26-tiny-dflash"))
    parser.add_argument("--prompts", type=Path, default=Path("checkpoints/heldout_prompts.jsonl"))
    parser.add_argument(
        "--tokens", type=int, default=25_000_000, help="of train.npy, that prompts come from"
    )
    parser.add_argument("--sequences", type=int, default=49_152)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--generate-batch", type=int, default=4096)
    parser.add_argument("--generate-minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=7800)
    parser.add_argument("--minutes", type=float, default=120.0, help="all from the program's start")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", choices=("auto", "cudnn", "package"), default="auto")
    parser.add_argument("--print-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
