"""What one rank does in a step, as a list: kernels, bytes and operations, from the sizes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k26jax.config import DraftConfig, ModelConfig, Quantization
from k26jax.config.quantization import GROUP_SIZE
from k26jax.errors import MeshError

_BF16, _F32 = 2, 4
_INT4 = 0.5 + 2 / 32  # half a byte a weight, and two bytes for 32 of them
_WHOLE_ROWS = 16  # rows that one pass over a weight serves; more read it again through the cache


@dataclass(frozen=True)
class Part:
    """Kernels of one kind in one stage.

    family: a key of `Costs`.
    launches: how many.   n_bytes, operations: of all of them together.
    passes: over the bytes; those behind the first find them in the card's cache.
    """

    stage: str
    family: str
    launches: float
    n_bytes: float = 0.0
    operations: float = 0.0
    passes: int = 1


@dataclass(frozen=True)
class Ranks:
    """How many ranks share what, and whether the drafter too."""

    tp_size: int
    ep_size: int = 1

    def draft_ranks(self, draft: DraftConfig) -> int:
        """Returns how many ranks share the drafter: those of TP, or it is whole on each."""
        sizes = (
            draft.num_attention_heads,
            draft.num_key_value_heads,
            draft.intermediate_size,
        )
        return self.tp_size if all(size % self.tp_size == 0 for size in sizes) else 1

    @property
    def several(self) -> bool:
        """Whether there is anything to sum over."""
        return self.tp_size * self.ep_size > 1


@dataclass(frozen=True)
class Load:
    """What a step is asked.

    rows: of one sequence; 1 is plain decoding.
    users: sequences at once.   context: cached tokens of each.
    touched: distinct experts of a layer that the busiest rank holds.
    """

    rows: int
    users: int
    context: int
    touched: float

    @property
    def all_rows(self) -> int:
        """Rows of all sequences together."""
        return self.rows * self.users


def check_ranks(model: ModelConfig, tp_size: int, ep_size: int) -> None:
    """Raises MeshError unless so many ranks can share the model evenly, as the engine does."""
    group = GROUP_SIZE if model.quantization is Quantization.INT4_EXPERTS else 1
    for flag, ranks, what, size in (
        ("--tp-size", tp_size, "attention heads", model.num_attention_heads),
        ("--tp-size", tp_size, "tokens of the vocabulary", model.vocab_size),
        ("--tp-size", tp_size, "columns of a dense block", model.intermediate_size),
        ("--tp-size", tp_size * group, "columns of an expert", model.moe_intermediate_size),
        ("--ep-size", ep_size, "experts", model.n_routed_experts),
    ):
        if size % ranks:
            by = tp_size if flag == "--tp-size" else ep_size
            raise MeshError(f"{flag} {by} does not share {size} {what} evenly; use a divisor")


def expert_bytes(model: ModelConfig, ranks: Ranks) -> float:
    """Returns the bytes of a rank's part of one routed expert of one layer."""
    weights = 3 * model.hidden_size * model.moe_intermediate_size / ranks.tp_size
    return weights * (_INT4 if model.quantization is Quantization.INT4_EXPERTS else _BF16)


def token_bytes(model: ModelConfig) -> int:
    """Returns the bytes of one token in the target's cache, whole on every rank."""
    return model.num_hidden_layers * (model.kv_lora_rank + model.qk_rope_head_dim) * _BF16


def draft_token_bytes(draft: DraftConfig, ranks: Ranks) -> int:
    """Returns the bytes of one token in a rank's part of the drafter's cache."""
    heads = draft.num_key_value_heads // ranks.draft_ranks(draft)
    return draft.num_hidden_layers * 2 * heads * draft.head_dim * _BF16


def target_parts(model: ModelConfig, ranks: Ranks, load: Load) -> Iterator[Part]:
    """Yields what verification does: one pass of the target over all rows."""
    hidden, rows = model.hidden_size, load.all_rows
    yield Part("verify", "small", 6 if rows > 1 else 5)  # positions, words, embedding, norm
    for _ in range(model.num_hidden_layers):
        yield from _attention(model, ranks, load)
    for _ in model.dense_layer_ids:
        width = model.intermediate_size / ranks.tp_size
        yield Part("verify", "small", 1)
        yield _dense("verify", 2 * hidden * width, rows)
        yield _dense("verify", hidden * width, rows)
    for _ in model.moe_layer_ids:
        yield from _experts(model, ranks, load)
    yield _dense("verify", hidden * model.vocab_size / ranks.tp_size, rows)


def draft_parts(model: ModelConfig, draft: DraftConfig, ranks: Ranks, load: Load) -> Iterator[Part]:
    """Yields what draft, tree_build and the drafter's share of compact do."""
    share, hidden, users = ranks.draft_ranks(draft), draft.hidden_size, load.users
    rows, head_dim = draft.block_size * users, draft.head_dim
    query = draft.num_attention_heads * head_dim / share
    key = draft.num_key_value_heads * head_dim / share
    budget, depth = load.rows - 1, min(draft.depth, load.rows - 1)
    for window in draft.windows:
        seen = min(window or load.context, load.context) * users
        yield Part("draft", "small", 2 + 2 + 2)  # norms, heads, merge and cast
        yield _dense("draft", hidden * (query + 2 * key), rows)
        yield Part("draft", "draft_attention", 1, seen * 2 * key * _BF16)
        yield _dense("draft", hidden * query, rows)
        width = draft.intermediate_size / share
        yield _dense("draft", 2 * hidden * width, rows)
        yield _dense("draft", hidden * width, rows)
    vocabulary = model.vocab_size / ranks.tp_size
    yield _dense("draft", hidden * vocabulary, depth * users)
    yield Part("draft", "small", 7)
    yield Part("draft", "top", 2, depth * users * vocabulary * _F32)
    yield Part("tree_build", "tree", budget / 16, depth * budget * 8)
    features = len(draft.target_layer_ids) * hidden / share
    yield _dense("compact", hidden * features, (depth + 1) * users)
    for _ in draft.windows:
        yield _dense("compact", 2 * hidden * key, (depth + 1) * users)
    yield Part("compact", "small", 2 + draft.num_hidden_layers + 6)


def end_parts(model: ModelConfig, ranks: Ranks, load: Load) -> Iterator[Part]:
    """Yields what accept and the target's share of compact do."""
    vocabulary = model.vocab_size / ranks.tp_size
    yield Part("accept", "small", 9)
    yield Part("accept", "top", 2, load.all_rows * vocabulary * _F32)
    yield Part("compact", "small", 4, load.users * token_bytes(model))


def _attention(model: ModelConfig, ranks: Ranks, load: Load) -> Iterator[Part]:
    hidden, rows = model.hidden_size, load.all_rows
    heads = model.num_attention_heads / ranks.tp_size
    nope, rope = model.qk_nope_head_dim, model.qk_rope_head_dim
    value, latent = model.v_head_dim, model.kv_lora_rank
    query, inputs = heads * (nope + rope), model.q_lora_rank
    # Norm, latent norms, merge; of a tree, its staging.
    small = 3 + (load.rows > 1)
    yield Part("verify", "small", small)
    yield Part("verify", "small", 2, heads * (nope + value) * latent * _BF16)  # absorb, values
    if inputs is None:
        yield _dense("verify", hidden * (query + latent + rope), rows)
    else:
        yield _dense("verify", hidden * (inputs + latent + rope), rows)
        yield _dense("verify", inputs * query, rows)
    yield Part("verify", "tree_mla", 1, load.users * load.context * (latent + rope) * _BF16)
    yield _dense("verify", hidden * heads * value, rows)


def _experts(model: ModelConfig, ranks: Ranks, load: Load) -> Iterator[Part]:
    hidden, rows = model.hidden_size, load.all_rows
    width = model.moe_intermediate_size * model.n_shared_experts / ranks.tp_size
    small = 2 + (rows > 1)  # norm, router; behind it the work list, which one row's router makes
    yield Part("verify", "small", small)
    yield _dense("verify", hidden * (2 * width + model.n_routed_experts), rows)
    is_int4 = model.quantization is Quantization.INT4_EXPERTS
    pairs = rows * model.num_experts_per_tok / ranks.ep_size
    each = 3 * hidden * model.moe_intermediate_size / ranks.tp_size
    # The shared expert's last product stands in the kernel that adds the experts up.
    shared = hidden * width * _BF16
    n_bytes = load.touched * expert_bytes(model, ranks) + shared
    yield Part("verify", "int4_moe" if is_int4 else "float_moe", 4, n_bytes, 2 * each * pairs)


def _dense(stage: str, weights: float, rows: int) -> Part:
    passes = -(-rows // _WHOLE_ROWS)
    return Part(stage, "dense", 1, weights * _BF16, 2 * weights * rows, passes)


def rank_weight_bytes(model: ModelConfig, draft: DraftConfig | None, ranks: Ranks) -> float:
    """Returns the bytes of weights that one rank holds, but for norms and biases."""
    load = Load(1, 1, 0, model.n_routed_experts / ranks.ep_size)
    held = sum(part.n_bytes for part in target_parts(model, ranks, load))
    table = model.hidden_size * model.vocab_size / ranks.tp_size * _BF16
    held += 0 if model.tie_word_embeddings else table
    if draft is not None:
        tree = Load(2, 1, 0, 0)
        parts = draft_parts(model, draft, ranks, tree)
        held += sum(part.n_bytes for part in parts if part.family == "dense") - table
        # Keys and values are read by the drafter's pass and by the commit: once held.
        share = ranks.draft_ranks(draft)
        key = draft.num_key_value_heads * draft.head_dim / share
        held -= draft.num_hidden_layers * 2 * draft.hidden_size * key * _BF16
    return held
