"""Drawn draft trees: both layouts, and the tree read back from the drawing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from k26jax.commands.trees import ACCEPTED, REJECTED, draw_tree
from k26jax.engine.output import StepTrace

# 0 ─┬─ 1 ─┬─ 3 ─── 5
#    └─ 2  └─ 4
TRACE = StepTrace(
    token_ids=[10, 11, 12, 13, 14, 15],
    parents=[-1, 0, 0, 1, 1, 3],
    depths=[0, 1, 1, 2, 2, 3],
    path=[0, 1, 4],
)


def test_from_left_to_right():
    assert draw_tree(TRACE, str).splitlines() == [
        "● 10─┬─● 11─┬─○ 13───○ 15",
        "     │      └─● 14",
        "     └─○ 12",
    ]


def test_one_node_a_line_where_the_width_is_short():
    wide = draw_tree(TRACE, str, width=25)
    assert wide == draw_tree(TRACE, str)
    assert max(map(len, wide.splitlines())) == 25
    assert draw_tree(TRACE, str, width=24).splitlines() == [
        "● 10",
        "├─● 11",
        "│ ├─○ 13",
        "│ │ └─○ 15",
        "│ └─● 14",
        "└─○ 12",
    ]


def test_columns_count_the_cells_of_a_terminal():
    """A Chinese character takes two cells, a combining accent none."""
    names = {10: "中", 11: "e\u0301", 12: "x", 13: "a", 14: "b", 15: "c"}
    assert draw_tree(TRACE, names.__getitem__).splitlines() == [
        "● 中─┬─● e\u0301─┬─○ a───○ c",
        "     │     └─● b",
        "     └─○ x",
    ]


def test_colour_changes_no_other_character():
    plain, painted = draw_tree(TRACE, str), draw_tree(TRACE, str, color=True)
    assert painted.count("\x1b[1;32m● ") == len(TRACE.path)
    for code in ("\x1b[1;32m", "\x1b[2m", "\x1b[0m"):
        assert code in painted
        painted = painted.replace(code, "")
    assert painted == plain


def test_a_lone_root():
    assert draw_tree(StepTrace([7], [-1], [0], [0]), repr) == "● 7"


@st.composite
def traces(draw) -> StepTrace:
    size = draw(st.integers(1, 30))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    path = [draw(st.integers(0, size - 1))]
    while path[0]:
        path.insert(0, parents[path[0]])
    return StepTrace(list(range(100, 100 + size)), parents, depths, path)


def nodes_of(drawing: str):
    """Yields (row, column, node, whether accepted) of every label in reading order."""
    for row, line in enumerate(drawing.splitlines()):
        for column, mark in enumerate(line):
            if mark in (ACCEPTED, REJECTED):
                yield row, column, int(line[column + 2 : column + 5]) - 100, mark == ACCEPTED


@given(traces())
def test_the_tree_can_be_read_back_from_both_drawings(trace):
    across, down = draw_tree(trace, str, width=10_000), draw_tree(trace, str, width=1)
    for drawing in (across, down):
        found = list(nodes_of(drawing))
        assert sorted(node for _, _, node, _ in found) == list(range(len(trace.parents)))
        assert {node for _, _, node, accepted in found if accepted} == set(trace.path)
        for place, (_, column, node, _) in enumerate(found):
            # A label has five cells, then three of lines; one node a line: two cells a level.
            before = column - (8 if drawing is across else 2)
            above = [n for _, other, n, _ in found[:place] if other == before]
            assert (above[-1] if above else -1) == trace.parents[node]
