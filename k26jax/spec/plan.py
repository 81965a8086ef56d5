"""The static choices of a compiled step: how tokens are drafted and how wide a tree is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from k26jax.config import Algorithm


@dataclass(frozen=True)
class Plan:
    """What one compiled program is made for.

    budget: tree nodes without the root; 0 means plain decoding.
    depth: drafted tokens of one pass, the greatest depth of a tree.
    block_size: rows of one draft pass.
    has_extras: adjusts logits and tells log-probabilities for the slots that ask for it; a program
        without them does neither, and costs nothing for it.
    widths: rows among which every step chooses, ascending from 1; none: always `width`.
    """

    algorithm: Algorithm = Algorithm.NONE
    budget: int = 0
    depth: int = 0
    block_size: int = 0
    kernels: str = "reference"
    has_extras: bool = False
    widths: tuple[int, ...] = ()

    @classmethod
    def plain(cls, kernels: str = "reference") -> Plan:
        """Returns the plan of plain decoding: one token a step."""
        return cls(kernels=kernels)

    @classmethod
    def chain(cls, depth: int, block_size: int, kernels: str = "reference") -> Plan:
        """Returns the plan of a DFlash chain."""
        return cls(Algorithm.DFLASH, depth, depth, block_size, kernels)

    @classmethod
    def tree(cls, budget: int, depth: int, block_size: int, kernels: str = "reference") -> Plan:
        """Returns the plan of a DDTree with `budget` nodes besides the root."""
        if budget == 0:
            return cls.plain(kernels)
        return cls(Algorithm.DDTREE, budget, min(depth, budget), block_size, kernels)

    def with_extras(self) -> Plan:
        """Returns the same plan with extras: the same tokens for slots that ask for none."""
        return replace(self, has_extras=True)

    @classmethod
    def auto(
        cls, widths: tuple[int, ...], depth: int, block_size: int, kernels: str = "reference"
    ) -> Plan:
        """Returns the plan of DDTrees of which each step chooses the rows among `widths`."""
        return replace(cls.tree(widths[-1] - 1, depth, block_size, kernels), widths=widths)

    def of_width(self, width: int) -> Plan:
        """Returns the plan of a step that verifies the first `width` rows of this one's tree.

        One row is not plain decoding: the drafter reads on.
        """
        return replace(self, budget=width - 1, depth=min(self.depth, width - 1), widths=())

    @property
    def drafts(self) -> bool:
        """Whether the step runs the drafter."""
        return self.algorithm is not Algorithm.NONE

    @property
    def width(self) -> int:
        """Rows of one verification, the root included."""
        return self.budget + 1
