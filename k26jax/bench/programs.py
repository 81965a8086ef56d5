"""The programs that the checker compiles and the benchmarks time: every kernel case, and the step.

All arguments are abstract; nothing here is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from k26jax.config import ModelConfig, Quantization, RopeConfig
from k26jax.model.parameters import abstract, arrays, bind
from k26jax.model.target import Target, arrangement
from k26jax.pallas import (
    dense,
    draft_attention,
    int4_moe,
    norm,
    router,
    tree_build,
    tree_mla,
    vocab_topk,
)
from k26jax.pallas.dense.cases import CASES as DENSE
from k26jax.pallas.dense.cases import HEADS_CASES as DENSE_HEADS
from k26jax.pallas.draft_attention.cases import CASES as DRAFT
from k26jax.pallas.int4_moe.cases import CASES as MOE
from k26jax.pallas.norm.cases import HEADS_CASES as NORM_HEADS
from k26jax.pallas.router.cases import CASES as ROUTER
from k26jax.pallas.tree_build.cases import CASES as TREES
from k26jax.pallas.tree_mla.cases import CASES as MLA
from k26jax.pallas.vocab_topk.cases import CASES as TOP
from k26jax.spec.plan import Plan
from k26jax.spec.prefill import Chunk, prefill
from k26jax.spec.state import Models, SpecState
from k26jax.spec.step import step

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
ROWS = 17
LAYER = {"layer": 0}


@dataclass(frozen=True)
class Candidate:
    """A function and its abstract arguments.

    donate: arguments that the program may write into.
    """

    kernel: str
    case: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()


def kernel_programs() -> Iterator[Candidate]:
    """Yields every case of every kernel; to be lowered where the GPU is in context."""
    for family in (_dense, _norm, _router, _moe, _mla, _draft, _top, _trees):
        yield from family()


def of(*shape: int, dtype: Any = BF16) -> Any:
    """Returns an abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _dense() -> Iterator[Candidate]:
    options = {"kernels": "pallas", **LAYER}
    for case in DENSE:
        weights = tuple(of(2, width, case.k) for width in case.widths)
        x = of(ROWS, case.k)
        if case.is_gated:
            arguments = (x, weights[0], weights[0], weights[1:])
            yield Candidate("dense", case.name, functools.partial(_gated, **options), arguments)
        else:
            form = dense.partial_sums if case.is_parts else dense.dense
            function = functools.partial(form, **options)
            yield Candidate("dense", case.name, function, (x, weights))
    for case in DENSE_HEADS:
        options = {"nope": case.nope, "kernels": "pallas", **LAYER}
        kv_b = of(2, case.heads, case.nope + case.value, case.latent)
        query = of(ROWS, case.heads, case.nope + case.rope)
        attended = of(ROWS, case.heads, case.latent, dtype=F32)
        angles = of(ROWS, case.rope // 2, dtype=F32)
        absorb = functools.partial(dense.absorb, interleaved=True, **options)
        yield Candidate("dense", f"absorb {case.name}", absorb, (query, kv_b, angles, angles))
        values = functools.partial(dense.values, **options)
        yield Candidate("dense", f"values {case.name}", values, (attended, kv_b))


def _gated(x: Any, gate: Any, up: Any, others: Any, **options: Any) -> Any:
    return dense.gated(x, gate, up, others=others, **options)


def _norm() -> Iterator[Candidate]:
    options = {"eps": 1e-5, "kernels": "pallas", **LAYER}
    for width in (200, 7168):
        x = of(ROWS, width)
        yield Candidate(
            "norm", f"add_rms_norm {width}", functools.partial(norm.add_rms_norm, **options),
            (x, x, of(2, width)),
        )  # fmt: skip
    for case in NORM_HEADS:
        angles = of(ROWS, case.rope // 2, dtype=F32)

        def latent(rows, gains, cos, sin, query, query_gains):
            return norm.latent(
                rows, gains, cos, sin, interleaved=True, query=query, query_gains=query_gains,
                **options,
            )  # fmt: skip

        arguments = (
            of(2, ROWS, case.latent + case.rope, dtype=F32), of(2, case.latent), angles, angles,
            of(2, ROWS, case.query_rank, dtype=F32), of(2, case.query_rank),
        )  # fmt: skip
        yield Candidate("norm", f"latent {case.name}", latent, arguments)


def _router() -> Iterator[Candidate]:
    for case in ROUTER:
        function = functools.partial(
            router.route_and_list, rows=case.rows, kernels="pallas", **case.rule
        )
        bias = of(2, case.n_experts, dtype=F32) if case.has_bias else None
        logits = of(2, case.n_tokens, case.n_experts, dtype=F32)
        valid = of(case.n_tokens, dtype=jnp.bool_)
        yield Candidate("router", case.name, function, (logits, bias, valid))


def _moe() -> Iterator[Candidate]:
    for case in MOE:
        pairs = case.tokens * case.top_k
        most = min(pairs, case.n_experts) + pairs // int4_moe.BLOCK_ROWS
        blocks = router.Blocks(
            of(pairs + int4_moe.BLOCK_ROWS, dtype=I32),
            of(most, dtype=I32),
            of(most, dtype=I32),
            of(most, dtype=I32),
            of(1, dtype=I32),
        )

        def function(x, ids, weights, blocks, shared, experts, case=case):
            options = {"inner": case.inner, "dtype": BF16, "shared": shared, **LAYER}
            return int4_moe.tiled_experts(x, ids, weights, blocks, experts, **options)

        width = case.inner
        first = of(4, case.tokens, width, dtype=F32)
        shared = int4_moe.Shared(first, first, of(2, case.hidden, width))
        experts = int4_moe.TiledExperts(
            _tiles(case.n_experts, 2 * case.inner, case.hidden),
            _tiles(case.n_experts, case.hidden, case.inner),
        )
        chosen = of(case.tokens, case.top_k, dtype=I32), of(case.tokens, case.top_k, dtype=F32)
        arguments = (of(case.tokens, case.hidden), *chosen, blocks, shared, experts)
        yield Candidate("int4_moe", case.name, function, arguments)


def _tiles(n_experts: int, outputs: int, inputs: int) -> int4_moe.Tiles:
    columns = int4_moe.expert_columns()
    grid = (2, n_experts, -(-outputs // columns), -(-inputs // 128))
    return int4_moe.Tiles(of(*grid, columns, 32, dtype=jnp.int16), of(*grid, 2, columns, dtype=I32))


def _mla() -> Iterator[Candidate]:
    for case in MLA:
        batch, rows = len(case.lengths), case.rows
        each, cache = (batch, rows), (2, batch, case.capacity)
        widths = (case.latent, case.rope)
        operands = (
            *(of(*each, case.heads, width) for width in widths),
            *(of(*cache, width) for width in widths),
            *(of(*each, width) for width in widths),
        )
        words = of(*each, -(-rows // 32), dtype=jnp.uint32)
        numbers = of(batch, dtype=I32)
        yield Candidate("tree_mla", case.name, _attend, (numbers, numbers, words, *operands))


def _attend(slots: Any, lengths: Any, ancestors: Any, *operands: Any) -> Any:
    return tree_mla.tree_mla(
        *operands, slots=slots, lengths=lengths, ancestors=ancestors, scale=0.1, kernels="pallas",
        **LAYER,
    )  # fmt: skip


def _draft() -> Iterator[Candidate]:
    for case in DRAFT:
        batch = len(case.lengths)
        cache = of(2, batch, case.capacity, case.kv_heads, case.width)
        block = of(batch, case.rows, case.kv_heads, case.width)
        query = of(batch, case.rows, case.heads, case.width)
        options: dict[str, Any] = {"window": case.window, "causal": case.causal, "scale": 0.1}

        def function(query, keys, values, block_keys, block_values, lengths, options=options):
            return draft_attention.draft_attention(
                query, keys, values, block_keys, block_values, lengths=lengths,
                kernels="pallas", layer=0, **options,
            )  # fmt: skip

        arguments = (query, cache, cache, block, block, of(batch, dtype=I32))
        yield Candidate("draft_attention", case.name, function, arguments)


def _top() -> Iterator[Candidate]:
    for case in TOP:
        logits = of(case.rows, case.width, dtype=F32)
        top = functools.partial(vocab_topk.top_tokens, count=case.count, kernels="pallas")
        best = functools.partial(vocab_topk.best_token, kernels="pallas")
        yield Candidate("vocab_topk", case.name, best if case.count == 1 else top, (logits,))


def _trees() -> Iterator[Candidate]:
    for case in TREES:
        function = functools.partial(tree_build.build, budget=case.budget, kernels="pallas")
        table = (case.slots, case.depths, case.width)
        arguments = (of(*table, dtype=F32), of(*table, dtype=I32), of(case.slots, dtype=I32))
        yield Candidate("tree_build", case.name, function, arguments)


def rank_config(n_layers: int) -> ModelConfig:
    """Returns what one of eight tensor-parallel ranks holds of Kimi K2.6, with fewer layers."""
    rope = RopeConfig(50000.0, 64.0, 32.0, 1.0, 1.0, 1.0, 4096)
    return ModelConfig(
        model_type="kimi_k2", vocab_size=20480, hidden_size=7168, num_hidden_layers=n_layers,
        num_attention_heads=8, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, intermediate_size=2304, moe_intermediate_size=256,
        first_k_dense_replace=1, moe_layer_freq=1, n_routed_experts=384, num_experts_per_tok=8,
        n_shared_experts=1, n_group=1, topk_group=1, scoring_func="sigmoid",
        topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=2.827,
        rms_norm_eps=1e-5, rope=rope, max_position_embeddings=262144, eos_token_ids=(0,),
        quantization=Quantization.INT4_EXPERTS,
    )  # fmt: skip


def plain_step(n_layers: int, capacity: int = 4096) -> Candidate:
    """Returns a step of plain decoding at the size of a rank; made with the GPU in context."""
    config = rank_config(n_layers)
    module, _ = arrangement(abstract(lambda rngs: Target(config, dtype=BF16, rngs=rngs)))
    plan = Plan.plain("pallas")

    def function(params: Any, state: SpecState) -> SpecState:
        return step(Models(bind(module, params)), state, plan)[0]

    state = jax.eval_shape(
        lambda: SpecState.empty(config, None, slots=1, capacity=capacity, dtype=BF16)
    )
    name = f"plain, {n_layers} layers"
    return Candidate("step", name, function, (arrays(module), state), donate=(1,))


def prompt_chunk(n_layers: int, tokens: int = 1024, capacity: int = 4096) -> Candidate:
    """Returns the prefill of a chunk at the size of a rank; made with the GPU in context."""
    config = rank_config(n_layers)
    module, _ = arrangement(abstract(lambda rngs: Target(config, dtype=BF16, rngs=rngs)))

    def function(params: Any, chunk: Chunk, state: SpecState) -> SpecState:
        return prefill(Models(bind(module, params)), chunk, state, kernels="pallas")[0]

    state = jax.eval_shape(
        lambda: SpecState.empty(config, None, slots=1, capacity=capacity, dtype=BF16)
    )

    def of(*shape: int, dtype: Any = I32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    number = of()
    chunk = Chunk(
        token_ids=of(tokens),
        count=number,
        start=number,
        slot=number,
        is_last=of(dtype=jnp.bool_),
        max_tokens=number,
        sampling=state.sampling,
    )
    name = f"{tokens} tokens, {n_layers} layers"
    return Candidate("prefill", name, function, (arrays(module), chunk, state), donate=(2,))
