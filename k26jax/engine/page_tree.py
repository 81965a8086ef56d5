"""Which pages of prompts are kept, by their tokens: a radix tree in which an edge is a page.

The host's part of the prefix cache: numbers of pages alone, no JAX. What it answers depends on the
calls made and their order, on no clock, so processes that make the same calls agree.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self


@dataclass(eq=False)
class _Node:
    """A kept page: the tokens of its edge come after those of the pages above it.

    references: prompts under way whose last kept page this is; the pages above have this one
        below them, and so stay too.
    """

    parent: Self | None
    key: bytes
    page: int
    children: dict[bytes, Self] = field(default_factory=dict)
    references: int = 0


@dataclass
class _Prompt:
    """A prompt under way. tokens: from its start to the end of its last kept page."""

    node: _Node
    tokens: int


class PageTree:
    """Numbers of pages by the tokens of a prompt from its start up to the page's end.

    A page has one place: under the tokens before it. Those used longest ago make room, but for
    pages of prompts under way; a page goes before the page it follows.

    Args:
        pages: how many there are.
        page_tokens: tokens of each.
    """

    def __init__(self, pages: int, page_tokens: int):
        self.pages, self.page_tokens = pages, page_tokens
        self._root = _Node(None, b"", -1)
        self._free = list(range(pages - 1, -1, -1))
        # From least to most recently used; a page stands before the page it follows.
        self._kept: OrderedDict[int, _Node] = OrderedDict()
        self._prompts: dict[int, _Prompt] = {}

    @property
    def tokens(self) -> int:
        """Tokens that there is room for."""
        return self.pages * self.page_tokens

    @property
    def kept(self) -> int:
        """Pages that hold something."""
        return len(self._kept)

    def open(self, number: int, token_ids: Sequence[int]) -> list[int]:
        """Returns the pages of the longest kept start of a prompt, which stay until `close`.

        At least one token is left over: it has to be run for what comes after it.

        Args:
          number: of the prompt, for as long as it is under way.
        """
        assert number not in self._prompts, f"prompt {number} is under way"
        node, found = self._root, []
        for start in range(0, len(token_ids) - self.page_tokens, self.page_tokens):
            below = node.children.get(_key(token_ids[start : start + self.page_tokens]))
            if below is None:
                break
            node = below
            found.append(node.page)
        node.references += 1
        self._prompts[number] = _Prompt(node, len(found) * self.page_tokens)
        self._touch(node)
        return found

    def add(self, number: int, start: int, token_ids: Sequence[int]) -> int | None:
        """Returns the page that the caller has to fill with these tokens of a prompt.

        None if they are kept already, if a page before them is not, or if all pages are in use.

        Args:
          start: position of the first token.
          token_ids: one page of them.
        """
        assert len(token_ids) == self.page_tokens, f"{len(token_ids)} tokens are no page"
        prompt = self._prompts[number]
        if prompt.tokens != start:
            return None
        key, above = _key(token_ids), prompt.node
        node, page = above.children.get(key), None
        if node is None:
            page = self._free.pop() if self._free else self._evict()
            if page is None:
                return None
            node = above.children[key] = self._kept[page] = _Node(above, key, page)
        above.references -= 1
        node.references += 1
        self._prompts[number] = _Prompt(node, start + self.page_tokens)
        self._touch(node)
        return page

    def close(self, number: int) -> None:
        """Ends a prompt that is under way, if it is; its pages may be evicted from now on."""
        prompt = self._prompts.pop(number, None)
        if prompt is not None:
            prompt.node.references -= 1

    def clear(self) -> int:
        """Returns how many pages were kept; none is now. No prompt may be under way."""
        assert not self._prompts, f"prompts {sorted(self._prompts)} are under way"
        count = self.kept
        self._root.children.clear()
        self._free += reversed(self._kept)
        self._kept.clear()
        return count

    def check(self) -> None:
        """Raises AssertionError unless every page is in one place and every reference has a holder.

        Cost: a walk over the tree.
        """
        nodes, below = [], [self._root]
        while below:
            node = below.pop()
            nodes.append(node)
            for key, child in node.children.items():
                assert child.parent is node, f"page {child.page} hangs under another page"
                assert child.key == key, f"page {child.page} hangs under another page's tokens"
                below.append(child)
        reached = [node.page for node in nodes if node is not self._root]
        assert sorted(reached) == sorted(self._kept), "pages are kept that no prompt leads to"
        assert sorted(reached + self._free) == list(range(self.pages)), "pages are lost"
        held = [prompt.node for prompt in self._prompts.values()]
        counts = {id(node): sum(node is other for other in held) for node in held}
        for node in nodes:
            expected = counts.pop(id(node), 0)
            assert node.references == expected, (
                f"page {node.page} has {node.references} references and {expected} holders"
            )
        assert not counts, "prompts hold pages that were evicted"
        order = {page: place for place, page in enumerate(self._kept)}
        assert all(
            node.parent is self._root or order[node.page] < order[node.parent.page]
            for node in nodes
            if node.parent is not None
        ), "a page would be evicted before one that follows it"

    def check_idle(self) -> None:
        """Raises AssertionError unless `check` holds and no prompt is under way."""
        assert not self._prompts, f"idle with prompts {sorted(self._prompts)} under way"
        self.check()

    def _touch(self, node: _Node) -> None:
        above: _Node | None = node
        while above is not None and above.parent is not None:
            self._kept.move_to_end(above.page)
            above = above.parent

    def _evict(self) -> int | None:
        for node in self._kept.values():
            if not node.children and not node.references:
                assert node.parent is not None
                del node.parent.children[node.key]
                del self._kept[node.page]
                return node.page
        return None


def _key(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
