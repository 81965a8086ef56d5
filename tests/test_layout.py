"""The rules of the tree that no single file can show: imports, sizes, names, effects, paths."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "k26jax"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
STAGES = ["draft", "tree_build", "verify", "accept", "compact"]
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:home|root|work|tmp)/")
QUERIES = {"devices", "local_devices", "device_count", "local_device_count", "default_backend"}
WRITES = {"update", "setdefault", "pop", "clear", "putenv", "unsetenv"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _run(code: str) -> str:
    """Returns what a fresh interpreter prints for a piece of code."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_imports_follow_the_layers():
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("folder", ["k26jax", "scripts", "tests"])
def test_files_are_short(folder):
    lengths = {_name(p): len(p.read_text().splitlines()) for p in (ROOT / folder).rglob("*.py")}
    lengths = {n: count for n, count in lengths.items() if "golden" not in n}
    assert lengths
    assert {n: count for n, count in lengths.items() if count >= MAX_FILE_LINES} == {}


def test_functions_are_short():
    long = {
        f"{_name(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno - node.lineno + 1 >= MAX_FUNCTION_LINES
    }
    assert long == {}


def _at_import(tree: ast.AST):
    """Yields the nodes that run when a module is imported: all but the bodies of functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _at_import(node)


def _effects(source: str) -> list[str]:
    found = []
    for node in _at_import(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            is_query = owner == "jax" and node.func.attr in QUERIES
            is_write = owner in ("os", "os.environ", "jax.config") and node.func.attr in WRITES
            if is_query or is_write:
                found.append(ast.unparse(node))
        is_set = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        if is_set and ast.unparse(node.value) == "os.environ":
            found.append(ast.unparse(node))
    return found


def test_no_module_has_effects():
    assert {_name(p): e for p in SOURCES if (e := _effects(p.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "N = len(jax.devices())",
        "os.environ['A'] = 'b'",
        "if True:\n    os.environ.setdefault('A', 'b')",
        "class A:\n    jax.config.update('jax_enable_x64', True)",
    ],
)
def test_the_scan_sees_effects(line):
    assert _effects(line)
    indented = line.replace("\n", "\n    ")
    assert _effects(f"def f():\n    {indented}") == []


def test_importing_every_module_writes_no_environment_and_asks_for_no_device():
    """The nearest frame outside the standard library tells who wrote."""
    out = _run(f"""
import importlib, os, pathlib, pkgutil, sys
package = {str(PACKAGE)!r}
written = []
def hook(event, args):
    if event in ("os.putenv", "os.unsetenv"):
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename in (os.__file__, "<frozen os>"):
            frame = frame.f_back
        if frame and frame.f_code.co_filename.startswith(package):
            written.append((frame.f_code.co_filename, args[0]))
sys.addaudithook(hook)
import k26jax
names = [m.name for m in pkgutil.walk_packages(k26jax.__path__, "k26jax.")]
names.remove("k26jax.__main__")
for name in names:
    importlib.import_module(name)
from jax._src import xla_bridge
print(len(names), written, xla_bridge.backends_are_initialized())
""")
    count, rest = out.split(" ", 1)
    assert int(count) >= 40
    assert rest == "[] False"


@pytest.mark.parametrize(
    "module", ["k26jax", "k26jax.config", "k26jax.errors", "k26jax.text.tokenizer", "k26jax.cli"]
)
def test_modules_that_import_no_jax(module):
    out = _run(f"import sys, {module}; print([m for m in ('jax', 'flax') if m in sys.modules])")
    assert out == "[]"


def test_stage_words_are_the_scopes_of_the_step():
    tree = ast.parse((PACKAGE / "spec" / "step.py").read_text())
    step = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "step")
    scopes = [
        (node.items[0].context_expr.args[0].value, ast.unparse(node.body[0]))
        for node in step.body
        if isinstance(node, ast.With)
    ]
    assert [word for word, _ in scopes] == STAGES
    for word, statement in scopes:
        assert f"{word}(" in statement
        assert (PACKAGE / "spec" / f"{word}.py").is_file()


def _texts():
    for top in ("k26jax", "scripts", "docs", "checkpoints", ".ci"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path
    yield from sorted(ROOT.glob("*.md"))
    yield ROOT / "pyproject.toml"


def test_no_file_names_a_path_of_a_machine():
    found = {}
    for path in _texts():
        try:
            hits = MACHINE_PATH.findall(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if hits:
            found[_name(path)] = hits
    assert found == {}


def test_test_modules_have_names_of_their_own():
    """Pytest imports them by name alone: of two alike it collects one, and only in whole runs."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
