"""The command line: help without JAX, nearest flags, exit codes, inspection, a drawn tree."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from k26jax.cli import main
from k26jax.commands.options import tokens
from k26jax.commands.trees import draw_tree
from k26jax.engine.output import StepTrace


def test_help_imports_no_jax():
    code = (
        "import sys, k26jax.cli as c\n"
        "try: c.main(['generate', '--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--speculative-ddtree-budget" in done.stdout


def test_an_unknown_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "x", "--modle-path", "y"])
    assert exit_.value.code == 2
    assert "--model-path" in capsys.readouterr().err


def test_exit_codes_say_what_was_wrong(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 3
    assert main(["generate", "x"]) == 2
    assert main(["generate", "x", "--model-path", str(tmp_path), "--temperature", "-1"]) == 2
    assert "temperature" in capsys.readouterr().err


def test_every_golden_folder_is_inspected(golden_dir, capsys):
    folders = [path.parent for path in golden_dir.glob("**/config.json")]
    assert folders
    for folder in folders:
        assert main(["inspect", str(folder), "--json"]) == 0, folder
        summary = json.loads(capsys.readouterr().out)
        assert summary["fault"] is None
        assert sum(summary["parameters"].values()) > 0


def test_a_tree_is_drawn_with_its_path_marked():
    trace = StepTrace([5, 6, 7, 8], [-1, 0, 0, 1], [0, 1, 1, 2], [0, 1, 3])
    assert draw_tree(trace, str).splitlines() == [
        "* 5",
        "* ├─ 6",
        "* │  └─ 8",
        "  └─ 7",
    ]


def test_token_counts_take_a_suffix():
    assert (tokens("64k"), tokens("512"), tokens("1M")) == (65536, 512, 1048576)
