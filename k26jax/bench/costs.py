"""What the performance model is told: GPUs, all-reduces, and what kernels cost beside their bytes.

Every figure has its source beside it. What `bench rank --json` measured replaces some of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from k26jax.errors import ConfigError, nearest

_GIB = 1 << 30
# A plain kernel's share of the data sheet's rate on an H200: 4.27 of 4.8 TB/s, measured here.
_READ_SHARE = 4.27 / 4.8


@dataclass(frozen=True)
class Card:
    """One GPU.

    memory_bytes: that arrays can take.
    read_bytes_a_second: what a plain kernel reads.
    operations_a_second: bfloat16 matrix multiplications and additions.
    link: the all-reduces it has with its neighbours.
    source: where the figures are from.
    """

    name: str
    memory_bytes: int
    read_bytes_a_second: float
    operations_a_second: float
    link: str
    source: str


CARDS = {
    "h200": Card(
        "NVIDIA H200", 139 * _GIB, 4.27e12, 790e12, "nvlink",
        "reading and matrix rate measured here; memory as the driver gives it",
    ),
    "b200": Card(
        "NVIDIA B200", 178 * _GIB, 7.7e12 * _READ_SHARE, 2250e12, "nvlink",
        "data sheet (7.7 TB/s, 2.25 PFLOP/s dense), read at the H200's share of it; not measured",
    ),
    "rtx-pro-6000": Card(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", 94 * _GIB, 1.792e12 * _READ_SHARE, 503e12,
        "pcie",
        "data sheet (1.79 TB/s, 503 TFLOP/s dense), read at the H200's share of it; not measured",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class AllReduce:
    """How long sums over ranks take.

    points: (bytes of one rank's array, seconds), rising. Between two points the time is a straight
      line; beyond the last the slope of the last two goes on; below the first it is the first's.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    source: str

    def seconds(self, n_bytes: int) -> float:
        """Returns the seconds of one all-reduce of so many bytes."""
        points = self.points
        if n_bytes <= points[0][0]:
            return points[0][1]
        if len(points) == 1:
            return points[0][1]
        pairs = list(itertools.pairwise(points))
        low, high = next((pair for pair in pairs if n_bytes <= pair[1][0]), pairs[-1])
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return low[1] + slope * (n_bytes - low[0])


_KIB, _MIB = 1 << 10, 1 << 20
ALL_REDUCES = {
    "nvlink": (
        AllReduce(
            "published",
            ((512, 5.9e-6), (32 * _KIB, 7.8e-6), (256 * _KIB, 16.7e-6), (512 * _KIB, 22e-6),
             (_MIB, 34e-6)),
            "one-shot kernel on 8 x H100, github.com/sgl-project/sglang/pull/2904",
        ),
        AllReduce(
            "measured",
            ((14 * _KIB, 15e-6), (896 * _KIB, 28e-6)),
            "jax.lax.psum of bfloat16 [T, 7168], T = 1 to 64, 122 in a program, on 2 x H200 here",
        ),
    ),
    "pcie": (
        AllReduce(
            "published",
            ((14 * _KIB, 45e-6), (896 * _KIB, 130e-6)),
            "class of figures of 8 x A800 over PCIe, github.com/vllm-project/vllm/issues/50576",
        ),
    ),
}  # fmt: skip
# Between hosts, on top of the one within each: no figure of ours, so a plain assumption.
HOSTS = AllReduce(
    "between hosts", ((_KIB, 25e-6), (_MIB, 25e-6 + _MIB / 40e9)), "assumed: 25 us and 40 GB/s"
)


@dataclass(frozen=True)
class Costs:
    """What kernels cost on the card that they were measured on.

    launch_seconds: of one kernel of a family, however little it does.
    efficiency: the share of plain reading that a family reaches with its bytes.
    key_seconds: of attention over the cache, for each cached position: a fixed part, and one for
      each query row of 8 heads.   row_seconds: of attention for each such row.
    host_seconds: a step, between dispatches of 8 steps.
    stage_factor: measured time of a stage over what the rest of this record says.
    source: where the figures are from.
    """

    launch_seconds: Mapping[str, float] = field(
        default_factory=lambda: {
            "small": 2.0e-6, "dense": 4.0e-6, "int4_moe": 4.0e-6, "float_moe": 8.0e-6,
            "tree_mla": 10.7e-6, "draft_attention": 8.0e-6, "tree": 10.0e-6, "top": 5.0e-6,
        }
    )  # fmt: skip
    efficiency: Mapping[str, float] = field(
        default_factory=lambda: {
            "small": 0.5, "dense": 0.97, "int4_moe": 0.72, "float_moe": 0.85, "tree_mla": 1.0,
            "draft_attention": 0.5, "tree": 1.0, "top": 0.7,
        }
    )  # fmt: skip
    key_seconds: tuple[float, float] = (0.386e-9, 0.0376e-9)
    row_seconds: float = 0.376e-6
    host_seconds: float = 66e-6 / 8
    stage_factor: Mapping[str, float] = field(default_factory=dict)
    read_bytes_a_second: float = 4.27e12
    source: str = "kernels one by one on an H200, docs/kernels.md; fitted by hand"

    def factor(self, stage: str) -> float:
        """Returns what a stage is longer than the sum of its kernels."""
        return self.stage_factor.get(stage, 1.0)


def card(name: str) -> Card:
    """Returns a GPU by its short name.

    Raises: ConfigError for another name.
    """
    if name not in CARDS:
        raise ConfigError(f"no GPU {name!r}; there are {', '.join(CARDS)}{nearest(name, CARDS)}")
    return CARDS[name]


def all_reduce(link: str, name: str) -> AllReduce:
    """Returns one of a link's all-reduces.

    Raises: ConfigError if there is no such measurement.
    """
    known = {item.name: item for item in ALL_REDUCES[link]}
    if name not in known:
        raise ConfigError(
            f"no all-reduce {name!r} over {link}; there are {', '.join(known)}"
            f"{nearest(name, known)}"
        )
    return known[name]
