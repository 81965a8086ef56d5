"""`k26jax inspect`: what a model folder holds, and what would not load and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k26jax.commands.terminal import say
from k26jax.errors import CheckpointError, TokenizerError
from k26jax.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from k26jax.checkpoint.summary import Summary

_TOKENIZER_FILES = ("tiktoken.model", "tokenizer.json")


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a folder holds and whether it would load",
        description="Shows what a target or drafter folder holds, from its configuration and the "
        "headers of its files. Exits with 3 if it would not load.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 3 if the folder would not load."""
    from k26jax.checkpoint.summary import summarize

    summary = summarize(args.folder)
    faults = [summary.fault] if summary.fault else []
    tokenizer = None
    try:
        tokenizer = _tokenizer(args.folder, summary)
    except TokenizerError as error:
        faults.append(str(error))
    if args.json:
        record = dataclasses.asdict(summary) | {"tokenizer": _tokenizer_record(tokenizer)}
        print(json.dumps(record | {"fault": "; ".join(faults) or None}))
    else:
        print("\n".join(_table(summary, tokenizer)))
    for fault in faults:
        say(f"would not load: {fault}")
    return CheckpointError.exit_code if faults else 0


def _tokenizer(folder: Path, summary: Summary) -> Tokenizer | None:
    """Returns a target's tokenizer; None where there is none, which loads too."""
    has_files = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    if summary.kind != "target" or not has_files:
        return None
    return load_tokenizer(folder, summary.facts["vocabulary"])


def _tokenizer_record(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    return {
        "ids": tokenizer.vocab_size,
        "special_ids": tokenizer.special_ids,
        "eos_ids": list(tokenizer.eos_ids),
    }


def _table(summary: Summary, tokenizer: Tokenizer | None) -> Iterator[str]:
    yield f"{summary.folder}: {summary.kind}"
    facts = dict(summary.facts)
    if summary.kind == "target":
        facts |= _tokenizer_facts(facts, tokenizer)
    for name, value in facts.items():
        yield f"  {name:26} {', '.join(map(str, value)) if isinstance(value, list) else value}"
    if not summary.components:
        return
    yield f"  {'files':26} {summary.files}, {summary.file_bytes:,} bytes"
    yield f"\n  {'component':20} {'parameters':>19} {'bytes':>19}"
    rows = sorted(summary.components.items(), key=lambda item: -item[1].parameters)
    for name, component in rows:
        dtypes = ", ".join(
            dtype if len(component.bytes_by_dtype) == 1 else f"{dtype} {size:,}"
            for dtype, size in component.bytes_by_dtype.items()
        )
        yield f"  {name:20} {component.parameters:19,} {component.total_bytes:19,}  {dtypes}"
    parameters = sum(component.parameters for _, component in rows)
    size = sum(component.total_bytes for _, component in rows)
    yield f"  {'all':20} {parameters:19,} {size:19,}"
    for why, count in summary.skipped.items():
        yield f"  skipped: {count} tensors, {why}"
    for name in summary.ignored_files:
        yield f"  not read: {name}, which the index does not mention"


def _tokenizer_facts(facts: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the end tokens with their names, and what the tokenizer holds."""
    ids = facts["end tokens"]
    if tokenizer is None:
        return {"tokenizer": "none; prompts must be token ids"}
    ids = dict.fromkeys([*ids, *tokenizer.eos_ids])
    names = {id: tokenizer.token_bytes(id).decode("utf-8", "replace") for id in ids}
    return {
        "end tokens": [f"{id} {name}" for id, name in names.items()],
        "tokenizer": f"{tokenizer.vocab_size} ids, {len(tokenizer.special_ids)} of them special",
    }
