"""Rotary position settings, from both published spellings, with YaRN's two amplitudes.

Source: spec of YaRN as used by DeepSeek-V3 (formulas 19 to 23 of the model notes) and by the
Qwen3-style DFlash drafters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from k26jax.config.files import Fields
from k26jax.errors import ConfigError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one model.

    rope_theta: base of the frequencies.
    factor: YaRN context extension; 1.0 means plain rotary embedding.
    beta_fast, beta_slow: rotations that bound YaRN's ramp.
    mscale, mscale_all_dim: YaRN amplitude exponents; 0 means absent.
    original_max_position_embeddings: context before the extension, in tokens.
    attention_factor: amplitude on cos and sin, stated outright; None: derived from the mscales.
    """

    rope_theta: float
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None

    def inv_freq(self, dim: int) -> np.ndarray:
        """Returns the inverse frequencies, float32 [dim / 2]."""
        half = np.arange(dim // 2, dtype=np.float64)
        plain = self.rope_theta ** (-2.0 * half / dim)
        if self.factor == 1.0:
            return plain.astype(np.float32)

        def correction(rotations: float) -> float:
            span = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return dim * math.log(span) / (2 * math.log(self.rope_theta))

        low = max(math.floor(correction(self.beta_fast)), 0)
        high: float = min(math.ceil(correction(self.beta_slow)), dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((half - low) / (high - low), 0.0, 1.0)
        return (plain * ((1.0 - ramp) + ramp / self.factor)).astype(np.float32)

    @property
    def amplitude(self) -> float:
        """The factor on cos and sin.

        As in Hugging Face: the stated `attention_factor`; else the ratio of the two mscales if both
        are given; else 0.1 ln(factor) + 1. Engines differ for published drafters (1.0 or 1.4159 for
        the Kimi ones), so a folder may state `attention_factor` in its rope block.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor == 1.0:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """MLA's factor on the softmax scale: mscale_all_dim's amplitude, squared."""
        if self.factor == 1.0 or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    """Returns YaRN's amplitude 0.1 * mscale * ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def parse_rope(data: dict[str, Any], origin: str) -> RopeConfig:
    """Returns the rotary settings of a config object, old (`rope_scaling`) or new layout.

    Raises: ConfigError for a rope type other than default and yarn, or a missing field.
    """
    block = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(block, dict):
        raise ConfigError(f"{origin}: the rope block is {block!r}, expected an object")
    fields = Fields(block, f"{origin} (rope block)")
    theta = Fields({**data, **block}, origin).get("rope_theta", float)
    if theta <= 1:
        raise ConfigError(f"{origin}: rope_theta = {theta}, expected more than 1")
    fields.refuse("partial_rotary_factor", (1.0,), "every rotary component is rotated")
    fields.refuse("truncate", (True,), "YaRN's ramp has whole bounds")
    amplitude = fields.get("attention_factor", float, None)
    kind = block.get("rope_type") or block.get("type") or "default"
    if kind in ("default", "none"):
        return RopeConfig(rope_theta=theta, attention_factor=amplitude)
    if kind not in ("yarn", "deepseek_yarn"):
        raise ConfigError(f"{origin}: rope type {kind!r} is not supported; known: default, yarn")
    factor = fields.get("factor", float)
    if factor < 1:
        raise ConfigError(f"{fields.origin}: factor = {factor}, expected at least 1")
    return RopeConfig(
        rope_theta=theta,
        factor=factor,
        beta_fast=fields.get("beta_fast", float, 32.0),
        beta_slow=fields.get("beta_slow", float, 1.0),
        mscale=fields.get("mscale", float, 0.0),
        mscale_all_dim=fields.get("mscale_all_dim", float, 0.0),
        original_max_position_embeddings=fields.positive("original_max_position_embeddings"),
        attention_factor=amplitude,
    )
