"""Turns the documents of `training_data.py` into token files and picks held-out prompts.

`python scripts/encode_corpus.py --data .train --tokenizer checkpoints/k26-tiny` writes
`train.npy` and `heldout.npy` (uint16; each document is [BOS], its ids, [EOS]) and a file of
prompts: the beginnings of held-out files, each from another package where there are enough.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from k26jax.text.tokenizer import Tokenizer, load_tokenizer

MIN_PROMPT_TOKENS = 60
MAX_PROMPT_TOKENS = 200


def read_documents(path: Path) -> Iterator[dict[str, str]]:
    """Yields `{"source", "text"}` records."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def encode_file(path: Path, out: Path, tokenizer: Tokenizer) -> tuple[int, int]:
    """Writes the ids of all documents to one uint16 array; returns (token count, text bytes)."""
    begin, end = tokenizer.special_ids["[BOS]"], tokenizer.special_ids["[EOS]"]
    pieces, byte_count = [], 0
    for document in read_documents(path):
        byte_count += len(document["text"].encode())
        ids = tokenizer.encode(document["text"])
        pieces.append(np.array([begin, *ids, end], np.uint16))
    tokens = np.concatenate(pieces)
    np.save(out, tokens)
    return len(tokens), byte_count


def cut_prompt(text: str, tokenizer: Tokenizer, max_tokens: int) -> str | None:
    """Returns the longest run of whole lines with 60 to `max_tokens` tokens, or None.

    Starts after the comments and blank lines at the top, which are mostly licence headers.
    """
    prompt, best = "", None
    lines = text.splitlines(keepends=True)
    body = itertools.dropwhile(lambda line: line.startswith("#") or not line.strip(), lines)
    for line in itertools.islice(body, 200):
        prompt += line
        count = len(tokenizer.encode(prompt))
        if count > max_tokens:
            break
        if count >= MIN_PROMPT_TOKENS and line.strip():
            best = prompt
    return best


def choose_prompts(path: Path, tokenizer: Tokenizer, count: int) -> list[dict[str, str]]:
    """Returns prompts from different files, taking one file of each package in turn.

    The lengths go evenly from 60 to 200 tokens, so that a batch of them is ragged.
    """
    by_package: dict[str, list[dict[str, str]]] = {}
    for document in read_documents(path):
        by_package.setdefault(document["source"].split("/")[0], []).append(document)
    prompts: list[dict[str, str]] = []
    while len(prompts) < count and any(by_package.values()):
        for package in sorted(by_package):
            if not by_package[package] or len(prompts) == count:
                continue
            document = by_package[package].pop(0)
            room = MAX_PROMPT_TOKENS - MIN_PROMPT_TOKENS
            limit = MIN_PROMPT_TOKENS + room * (7 * len(prompts) % count + 1) // count
            prompt = cut_prompt(document["text"], tokenizer, limit)
            if prompt is not None:
                name = f"heldout-{len(prompts):02d}"
                source = document["source"]
                prompts.append({"custom_id": name, "prompt": prompt, "source": source})
    return prompts


def main() -> None:
    """Writes the token files, the prompts and READY.txt, which names the sizes."""
    parser = argparse.ArgumentParser(
        description="Turns documents into token files and picks held-out prompts."
    )
    parser.add_argument("--data", type=Path, default=Path(".train"))
    parser.add_argument("--tokenizer", type=Path, default=Path("checkpoints/k26-tiny"))
    parser.add_argument(
        "--prompts-out", type=Path, default=Path("checkpoints/heldout_prompts.jsonl")
    )
    parser.add_argument("--prompts", type=int, default=20)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.tokenizer)
    report = []
    for name in ("train", "heldout"):
        source, out = args.data / f"{name}_documents.jsonl", args.data / f"{name}.npy"
        tokens, text_bytes = encode_file(source, out, tokenizer)
        report.append(
            f"{name}: {tokens} tokens (uint16, with [BOS] and [EOS]), {text_bytes} bytes of text, "
            f"{text_bytes / tokens:.3f} bytes per token"
        )
    prompts = choose_prompts(args.data / "heldout_documents.jsonl", tokenizer, args.prompts)
    lines = [json.dumps(prompt) + "\n" for prompt in prompts]
    args.prompts_out.write_text("".join(lines), encoding="utf-8")
    report.append(f"prompts: {len(prompts)} in {args.prompts_out.name}")
    (args.data / "READY.txt").write_text("\n".join(report) + "\n")
    print("\n".join(report))


if __name__ == "__main__":
    main()
