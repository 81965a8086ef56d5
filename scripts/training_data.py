"""Builds the text corpus of the small trained model from Python source that is already installed.

Run it with the interpreter whose standard library and packages are to be read:
`python scripts/training_data.py --out .train`. Writes `train_documents.jsonl`,
`heldout_documents.jsonl` (one `{"source", "text"}` a line) and `sources.json`
(version, licence and byte count of every package).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Permissive licences only (BSD, MIT, Apache, PSF).
PACKAGES = (
    "click django flax jax jinja2 networkx numpy optax pytest requests rich scikit-learn scipy "
    "sqlalchemy sympy xarray"
)
STDLIB = "python"
MAX_FILE_BYTES = 200_000
MIN_FILE_BYTES = 200
MAX_LINE_CHARS = 400
GENERATED = re.compile(
    r"generated (by|from|automatically|file|code)|auto-?generated|do not edit", re.IGNORECASE
)


def is_wanted(text: str) -> bool:
    """Whether a file reads like source that a person wrote: no tables, no generated code."""
    if not MIN_FILE_BYTES <= len(text.encode()) <= MAX_FILE_BYTES:
        return False
    if any(len(line) > MAX_LINE_CHARS for line in text.splitlines()):
        return False
    if GENERATED.search("\n".join(text.splitlines()[:15])):
        return False
    words = sum(char.isalpha() or char.isspace() or char == "_" for char in text)
    digits = sum(char.isdigit() for char in text)
    return words > 0.6 * len(text) and digits < 0.1 * len(text)


def is_test(source: str) -> bool:
    """Whether a file belongs to a test suite, by its folder or its name."""
    *folders, name = source.split("/")
    return name.startswith("test_") or not {"test", "tests", "testing"}.isdisjoint(folders)


def order(source: str, text: str) -> int:
    """A pseudo-random 64-bit number that depends on the file's label and content alone."""
    return int.from_bytes(hashlib.sha256(f"{source}\n{text}".encode()).digest()[:8], "big")


def candidate_paths(package: str) -> Iterator[tuple[str, Path]]:
    """Yields (label without machine paths, file) for the Python files of one package."""
    if package == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py")):
            if "site-packages" not in path.parts:
                yield f"{STDLIB}/{path.relative_to(root).as_posix()}", path
        return
    for entry in importlib.metadata.distribution(package).files or []:
        if entry.suffix == ".py" and ".." not in entry.parts:
            yield entry.as_posix(), Path(entry.locate())


def describe(package: str) -> dict[str, str]:
    """Returns the version and the licence that the package's own metadata states."""
    if package == STDLIB:
        return {"version": platform.python_version(), "license": "PSF-2.0"}
    distribution = importlib.metadata.distribution(package)
    metadata = distribution.metadata
    stated = metadata.get_all("License-Expression") or [
        entry.rsplit("::", 1)[-1].strip()
        for entry in metadata.get_all("Classifier") or []
        if entry.startswith("License ::")
    ]
    stated = stated or [text.splitlines()[0] for text in metadata.get_all("License") or []]
    return {"version": distribution.version, "license": "; ".join(stated) or "unstated"}


def read_package(package: str, seen: set[str], limits: tuple[int, int]) -> list[tuple[str, str]]:
    """Returns (label, text) pairs, tests and the rest each cut at a byte limit, in hash order.

    Duplicates are recognised after white space is collapsed; `seen` grows with each file taken.
    """
    found = []
    for source, path in candidate_paths(package):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if "\0" not in text and is_wanted(text):
            found.append((source, text))
    left = list(limits)
    taken = []
    for source, text in sorted(found, key=lambda pair: order(*pair)):
        digest = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
        kind = int(is_test(source))
        if digest in seen or left[kind] < len(text.encode()):
            continue
        seen.add(digest)
        left[kind] -= len(text.encode())
        taken.append((source, text))
    return taken


def main() -> None:
    """Writes the corpus and prints its size by package."""
    parser = argparse.ArgumentParser(
        description="Builds the text corpus of the small trained model."
    )
    parser.add_argument("--out", type=Path, default=Path(".train"))
    parser.add_argument("--packages", nargs="*", default=PACKAGES.split())
    parser.add_argument("--max-code-mb", type=float, default=7.5, help="per package, tests aside")
    parser.add_argument("--max-test-mb", type=float, default=2.2, help="per package, tests only")
    parser.add_argument("--heldout-every", type=int, default=100, help="one file in this many")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    limits = (int(args.max_code_mb * 1e6), int(args.max_test_mb * 1e6))
    seen: set[str] = set()
    sources, documents = {}, []
    for package in [STDLIB, *args.packages]:
        taken = read_package(package, seen, limits)
        documents += taken
        count = sum(len(text.encode()) for _, text in taken)
        tests = sum(len(text.encode()) for source, text in taken if is_test(source))
        sources[package] = describe(package) | {"files": len(taken), "bytes": count, "tests": tests}
        print(package, sources[package])
    documents.sort(key=lambda pair: order(*pair))
    for name, heldout in (("train", False), ("heldout", True)):
        with (args.out / f"{name}_documents.jsonl").open("w", encoding="utf-8") as file:
            for source, text in documents:
                if (order(source, text) % args.heldout_every == 0) == heldout:
                    file.write(json.dumps({"source": source, "text": text}) + "\n")
    (args.out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")
    total = sum(entry["bytes"] for entry in sources.values())
    tests = sum(entry["tests"] for entry in sources.values())
    print(f"{len(documents)} files, {total / 1e6:.1f} MB, tests {tests / total:.1%}")


if __name__ == "__main__":
    main()
