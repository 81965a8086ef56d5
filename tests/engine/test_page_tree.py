"""Pages by tokens: what is found is what was filled, nothing in use goes, every count adds up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k26jax.engine.page_tree import PageTree

SIZE = 2


def prefill(tree: PageTree, number: int, prompt: str, size: int = SIZE) -> tuple[int, list]:
    """Runs a whole prompt; returns the tokens found and the pages filled."""
    ids = [ord(letter) for letter in prompt]
    found = len(tree.open(number, ids)) * size
    filled = [
        tree.add(number, start, ids[start : start + size])
        for start in range(found, len(ids) - size + 1, size)
    ]
    tree.close(number)
    return found, filled


def test_a_prompt_finds_the_pages_before_its_last_token():
    tree = PageTree(8, SIZE)
    assert prefill(tree, 0, "abcdef") == (0, [0, 1, 2])
    assert prefill(tree, 0, "abcdef") == (4, [None])
    assert prefill(tree, 0, "abcdefg") == (6, [])
    assert prefill(tree, 0, "abcxef") == (2, [3, 4])
    assert prefill(tree, 0, "bcdef") == (0, [5, 6])
    assert prefill(tree, 0, "ab") == (0, [None])
    assert (tree.kept, tree.tokens) == (7, 16)
    tree.check_idle()


def test_tokens_are_compared_and_not_their_text():
    """Ids of several bytes must not be found at another border."""
    tree = PageTree(4, SIZE)
    tree.open(0, [1, 256, 7])
    assert tree.add(0, 0, [1, 256]) == 0
    tree.close(0)
    assert tree.open(0, [256, 1, 7]) == []
    assert tree.open(1, [1, 256, 7]) == [0]


def test_the_longest_unused_goes_first_and_a_page_after_those_that_follow_it():
    tree = PageTree(4, SIZE)
    prefill(tree, 0, "aabb")
    prefill(tree, 0, "ccdd")
    prefill(tree, 0, "aabbx")
    assert prefill(tree, 0, "eeff") == (0, [3, 2])
    assert prefill(tree, 0, "aabbx")[0] == 4
    assert prefill(tree, 0, "ccddx")[0] == 0
    tree.check_idle()


def test_pages_of_a_prompt_under_way_stay():
    tree = PageTree(2, SIZE)
    prefill(tree, 0, "aabb")
    assert tree.open(0, list(b"aabbcc")) == [0, 1]
    assert tree.add(0, 4, list(b"cc")) is None, "there is no page left"
    assert prefill(tree, 1, "xxyy") == (0, [None, None])
    assert tree.add(0, 6, list(b"dd")) is None, "the page before is not kept"
    with pytest.raises(AssertionError, match="under way"):
        tree.clear()
    with pytest.raises(AssertionError, match="under way"):
        tree.check_idle()
    tree.close(0)
    assert prefill(tree, 1, "xxyy") == (0, [1, 0])
    assert tree.clear() == 2
    assert prefill(tree, 1, "xxyy") == (0, [0, 1])


def test_two_prompts_that_begin_alike_share_what_the_first_fills():
    tree = PageTree(4, SIZE)
    one, other = list(b"aabbc"), list(b"aabbd")
    assert tree.open(0, one) == tree.open(1, other) == []
    assert tree.add(0, 0, one[:2]) == 0
    assert tree.add(1, 0, other[:2]) is None
    assert tree.add(1, 2, other[2:4]) == 1
    assert tree.add(0, 2, one[2:4]) is None
    tree.close(0)
    tree.check()
    tree.close(1)
    tree.check_idle()
    assert tree.kept == 2


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda tree: tree._free.pop(), "pages are lost"),
        (lambda tree: tree._root.children.clear(), "no prompt leads to"),
        (lambda tree: setattr(tree._kept[0], "references", 1), "1 references and 0 holders"),
        (lambda tree: tree._kept.move_to_end(1), "before one that follows"),
    ],
)
def test_a_fault_in_the_counts_is_found(harm, message):
    tree = PageTree(4, SIZE)
    prefill(tree, 0, "aabb")
    tree.check_idle()
    harm(tree)
    with pytest.raises(AssertionError, match=message):
        tree.check()


class Traffic(RuleBasedStateMachine):
    """Prompts begin, go on page by page, end or are aborted; beside it, what each page holds."""

    def __init__(self):
        super().__init__()
        self.tree = PageTree(5, SIZE)
        self.held: dict[int, tuple[int, ...]] = {}
        self.prompts: dict[int, tuple[tuple[int, ...], int]] = {}

    @rule(number=st.integers(0, 2), ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, number, ids):
        if number in self.prompts:
            return
        pages = self.tree.open(number, ids)
        assert len(pages) * SIZE < len(ids)
        for index, page in enumerate(pages):
            assert self.held[page] == tuple(ids[: (index + 1) * SIZE])
        # Nothing longer was there.
        longer = tuple(ids[: (len(pages) + 1) * SIZE])
        assert len(longer) == len(ids) or longer not in self.held.values()
        self.prompts[number] = tuple(ids), len(pages) * SIZE

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def go_on(self, data):
        number = data.draw(st.sampled_from(sorted(self.prompts)))
        ids, start = self.prompts[number]
        piece = ids[start : start + SIZE]
        if len(piece) == SIZE:
            page = self.tree.add(number, start, piece)
            if page is not None:
                self.held[page] = ids[: start + SIZE]
        self.prompts[number] = ids, start + SIZE
        if start + SIZE >= len(ids):
            self.end(number)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data):
        self.end(data.draw(st.sampled_from(sorted(self.prompts))))

    @precondition(lambda self: not self.prompts)
    @rule()
    def flush(self):
        assert self.tree.clear() <= self.tree.pages
        self.held.clear()

    def end(self, number):
        self.tree.close(number)
        self.tree.close(number)  # a slot that is released twice
        del self.prompts[number]

    @invariant()
    def all_adds_up(self):
        self.tree.check()
        if not self.prompts:
            self.tree.check_idle()
        self.held = {page: ids for page, ids in self.held.items() if page in self.tree._kept}

    def teardown(self):
        for number in list(self.prompts):
            self.end(number)
        self.tree.check_idle()
        assert self.tree.kept <= self.tree.pages


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40)
