"""Shapes of the router that tests and benchmarks share."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """One routing of `n_tokens` tokens.

    rule: keyword arguments of `reference.route`.
    is_small: fit for interpret mode.
    """

    name: str
    n_tokens: int
    n_experts: int
    has_bias: bool
    rule: dict[str, Any]
    rows: int = 8
    is_small: bool = True


def _rule(top_k: int, scoring: str, method: str, groups: int, kept: int, norm: bool, scale: float):
    return {
        "num_experts_per_tok": top_k,
        "scoring_func": scoring,
        "topk_method": method,
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": norm,
        "routed_scaling_factor": scale,
    }


KIMI_K26 = _rule(8, "sigmoid", "noaux_tc", 1, 1, True, 2.827)
DEEPSEEK_V3 = _rule(8, "sigmoid", "noaux_tc", 8, 4, True, 2.5)
DEEPSEEK_V2_LITE = _rule(6, "softmax", "greedy", 1, 1, False, 1.0)
MOONLIGHT = _rule(6, "sigmoid", "noaux_tc", 1, 1, True, 2.446)

CASES = (
    Case("one", 1, 12, True, _rule(3, "sigmoid", "noaux_tc", 4, 2, True, 2.0)),
    Case("pairs of groups", 5, 12, True, _rule(3, "softmax", "noaux_tc", 12, 5, False, 1.0)),
    Case(
        "best of groups",
        17,
        24,
        False,
        _rule(2, "softmax", "group_limited_greedy", 3, 1, True, 1.5),
    ),
    Case("v2_lite", 3, 64, False, DEEPSEEK_V2_LITE, rows=16),
    Case("moonlight", 18, 64, True, MOONLIGHT),
    Case("v3", 4, 256, True, DEEPSEEK_V3),
    Case("k26", 5, 384, True, KIMI_K26),
    *(Case(f"k26 t={t}", t, 384, True, KIMI_K26, 8, False) for t in (1, 8, 16, 32, 64)),
)
