"""What a request changes of the target's logits: penalties, biases, tokens it must not choose.

A node's logits are changed as plain decoding would change them there: what has been emitted is
the slot's tokens so far and those of the node's own path in the tree. So the tokens stay those of
plain decoding, whatever the tree.

Order: logit_bias, repetition_penalty (over prompt and output), frequency_penalty and
presence_penalty (over the output), then end tokens before min_tokens and last tokens of bad words
become -inf.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from k26jax.config import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from k26jax.sharding.collectives import own_columns, rank
from k26jax.sharding.rules import MODEL
from k26jax.spec.tree import Tree

_BEFORE = MAX_BAD_WORD_TOKENS - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """What each slot changes of its logits, and what that depends on. Whole on every rank.

    is_on: whether the slot changes anything; if not, its other rows mean nothing.
    bias: added to the logits.
    repetition: divides positive logits of tokens that occurred.
    repetition_inverse: 1 / repetition; divides the other ones.
    frequency_inverse: 1 / frequency_penalty; infinite: off.
    presence: taken from the logits of emitted tokens.
    in_prompt: tokens of the prompt.
    counts: how often each token was emitted, the anchor included.
    recent: the newest emitted tokens, the anchor last; padded in front with -1.
    bad_words: spellings from their last token to their first, padded with -1.
    stop_from: position from which a stop id may stand.
    """

    is_on: Bool[Array, "slot"]
    bias: Float32[Array, "slot whole_w"]
    repetition: Float32[Array, "slot"]
    repetition_inverse: Float32[Array, "slot"]
    frequency_inverse: Float32[Array, "slot"]
    presence: Float32[Array, "slot"]
    in_prompt: Bool[Array, "slot whole_w"]
    counts: Int32[Array, "slot whole_w"]
    recent: Int32[Array, "slot before"]
    bad_words: Int32[Array, "slot words token"]
    stop_from: Int32[Array, "slot"]

    @classmethod
    def empty(cls, slots: int, vocab_size: int) -> Self:
        """Returns slots that change nothing."""
        return cls(
            is_on=jnp.zeros(slots, bool),
            bias=jnp.zeros((slots, vocab_size), jnp.float32),
            repetition=jnp.ones(slots, jnp.float32),
            repetition_inverse=jnp.ones(slots, jnp.float32),
            frequency_inverse=jnp.full(slots, jnp.inf, jnp.float32),
            presence=jnp.zeros(slots, jnp.float32),
            in_prompt=jnp.zeros((slots, vocab_size), bool),
            counts=jnp.zeros((slots, vocab_size), jnp.int32),
            recent=jnp.full((slots, _BEFORE), -1, jnp.int32),
            bad_words=jnp.full((slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
            stop_from=jnp.zeros(slots, jnp.int32),
        )

    def of(self, slot: jax.Array) -> Self:
        """Returns the rows of one slot."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, slot, 1), self)

    def with_slot(self, slot: jax.Array, rows: Self) -> Self:
        """Returns all slots with the rows of one, as `of` gives them, replaced."""
        return jax.tree.map(lambda all_, one: all_.at[slot].set(one[0]), self, rows)

    def without(self, slot: jax.Array) -> Self:
        """Returns all slots, one of which changes nothing any more."""
        return dataclasses.replace(self, is_on=self.is_on.at[slot].set(False))

    def emitted(self, slots: jax.Array, tokens: jax.Array, count: jax.Array) -> Self:
        """Returns all slots after slots[b] emitted the first count[b] of tokens[b]."""
        is_new = jnp.arange(tokens.shape[1]) < count[:, None]
        newest = jnp.arange(_BEFORE) + count[:, None]
        recent = jnp.concatenate([self.recent[slots], tokens], axis=1)
        recent = jnp.take_along_axis(recent, newest, axis=1)
        return dataclasses.replace(
            self,
            counts=self.counts.at[slots[:, None], tokens].add(is_new.astype(jnp.int32)),
            recent=self.recent.at[slots].set(recent),
        )


def adjust(
    logits: Float32[Array, "b t w"],
    adjustments: Adjustments,
    stop_ids: Int32[Array, "b stops"],
    path: Int32[Array, "b t depth"],
    depth: Int32[Array, "b t"],
    position: Int32[Array, "b t"],
) -> Float32[Array, "b t w"]:
    """Returns the logits that tokens are chosen from; of a slot that asks for nothing, its own.

    Args:
      logits: of this rank's tokens.
      stop_ids: padded with -1.
      path: tokens emitted below the root, as `lineage` gives them.
      depth: how many those are.
      position: absolute, of the token to be chosen.

    Cost: nothing but a look at the slots where none asks; else two passes over the logits.
    """

    def changed(logits: jax.Array) -> jax.Array:
        new = _penalized(logits, adjustments, path)
        is_out = _early_stops(logits, adjustments, stop_ids, position)
        is_out |= _bad_ends(logits, adjustments, path, depth)
        new = jnp.where(is_out, -jnp.inf, new)
        return jnp.where(adjustments.is_on[:, None, None], new, logits)

    return lax.cond(adjustments.is_on.any(), changed, lambda logits: logits, logits)


def lineage(tree: Tree, depth: int) -> Int32[Array, "b t {depth}"]:
    """Returns each node's own token, its parent's and so on up to the root's, which is left out.

    Padded with -1.

    Args:
      tree: one tree a slot.
      depth: the greatest depth of a node.
    """
    node = jnp.broadcast_to(jnp.arange(tree.parent.shape[1]), tree.parent.shape)
    found = []
    for _ in range(depth):
        token = jnp.take_along_axis(tree.token_ids, node, axis=1)
        is_below = jnp.take_along_axis(tree.depth, node, axis=1) > 0
        found.append(jnp.where(is_below, token, -1))
        node = jnp.maximum(jnp.take_along_axis(tree.parent, node, axis=1), 0)
    empty = jnp.zeros((*tree.parent.shape, 0), jnp.int32)
    return jnp.stack(found, axis=-1) if found else empty


def _columns(logits: jax.Array) -> jax.Array:
    """Returns the ids of this rank's tokens [w]."""
    held = logits.shape[-1]
    return jnp.arange(held, dtype=jnp.int32) + rank(MODEL) * held


def _penalized(logits: jax.Array, adjustments: Adjustments, path: jax.Array) -> jax.Array:
    # No product meets a sum here: a compiler may round the two once in one program and twice in
    # another, and plain decoding would choose from other bits than a tree.
    def of_slot(values: jax.Array) -> jax.Array:
        return values[:, None, None]

    on_path = path[..., None, :] == _columns(logits)[:, None]
    counts = own_columns(adjustments.counts, MODEL)[:, None] + on_path.sum(-1, dtype=jnp.int32)
    is_repeated = (counts > 0) | own_columns(adjustments.in_prompt, MODEL)[:, None]
    biased = logits + own_columns(adjustments.bias, MODEL)[:, None]
    divisor = jnp.where(
        biased > 0, of_slot(adjustments.repetition), of_slot(adjustments.repetition_inverse)
    )
    new = jnp.where(is_repeated, biased / divisor, biased)
    new -= counts.astype(jnp.float32) / of_slot(adjustments.frequency_inverse)
    return new - jnp.where(counts > 0, of_slot(adjustments.presence), 0.0)


def _early_stops(
    logits: jax.Array, adjustments: Adjustments, stop_ids: jax.Array, position: jax.Array
) -> jax.Array:
    """Returns which tokens [b, t, w] would end an answer too soon."""
    is_stop = (stop_ids[:, None] == _columns(logits)[:, None]).any(axis=-1)
    return is_stop[:, None] & (position < adjustments.stop_from[:, None])[..., None]


def _bad_ends(
    logits: jax.Array, adjustments: Adjustments, path: jax.Array, depth: jax.Array
) -> jax.Array:
    """Returns which tokens [b, t, w] would complete a bad word."""
    slots, nodes, held = logits.shape
    newest = _newest(adjustments.recent, path, depth)
    last, before = adjustments.bad_words[..., 0], adjustments.bad_words[:, None, :, 1:]
    fits = ((before < 0) | (before == newest[:, :, None])).all(axis=-1)
    column = last - rank(MODEL) * held
    # Where the token is another rank's, or there is no word, nothing is set.
    column = jnp.where((last >= 0) & (column >= 0), column, held)
    where = jnp.arange(slots)[:, None, None], jnp.arange(nodes)[:, None], column[:, None]
    return jnp.zeros(logits.shape, bool).at[where].max(fits, mode="drop")


def _newest(recent: jax.Array, path: jax.Array, depth: jax.Array) -> jax.Array:
    """Returns the emitted tokens [b, t, before] up to each node, from its own backwards."""
    back = jnp.arange(_BEFORE)
    own = jnp.pad(path, ((0, 0), (0, 0), (0, _BEFORE)))[..., :_BEFORE]
    place = jnp.clip(_BEFORE - 1 - (back - depth[..., None]), 0, _BEFORE - 1)
    older = jax.vmap(lambda tokens, place: tokens[place])(recent, place)
    return jnp.where(back < depth[..., None], own, older)
