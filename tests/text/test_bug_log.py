"""The public bug reports about chat text, templates, calls and stops: each has its test here."""

import re
from pathlib import Path

TOOL_CALLS = {1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17}
TEMPLATES_AND_REASONING = {18, 19, 21, 22, 23, 25, 26, 27, 29, 30, 31}
STREAMS_AND_STOPS = {33, 34, 35, 37, 38, 39, 41, 42}
OF_THE_SERVER = {111, 129}  # what text alone can show of them


def test_every_entry_has_a_test_named_after_it():
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    tested = {
        int(number) for text in sources for number in re.findall(r"def test_bug_(\d+)_", text)
    }
    assert tested == TOOL_CALLS | TEMPLATES_AND_REASONING | STREAMS_AND_STOPS | OF_THE_SERVER
