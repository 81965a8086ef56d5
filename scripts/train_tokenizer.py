"""Trains a byte-level vocabulary with Kimi's split pattern and writes it in Kimi's file layout.

`python scripts/train_tokenizer.py --data .train --out checkpoints/k26-tiny` reads
`train_documents.jsonl` and writes `tiktoken.model` and `tokenizer_config.json`. Training is
deterministic: merge counts decide, ties go to the library's fixed order; there is no seed.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from k26jax.text.tiktoken_model import KIMI_PATTERN, SPECIAL_SLOTS
from k26jax.text.tokenizer import load_tokenizer
from k26jax.text.tokenizer_json import byte_characters

# Offsets within the 256 control slots, as in Kimi K2.6 (there the first slot is 163584).
HIDDEN_SLOTS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
SHOWN_SLOTS = {
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    22: "<think>",
    23: "</think>",
}


def read_texts(path: Path) -> Iterator[str]:
    """Yields the text of each document."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def train(texts: Iterator[str], size: int) -> list[bytes]:
    """Returns `size` tokens in rank order: the 256 bytes, then merges as they were found."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    values = byte_characters()
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(values[char] for char in piece) for piece, _ in by_id]
    if len(tokens) != size or any(len(token) != 1 for token in tokens[:256]):
        raise SystemExit(f"the text gives {len(tokens)} tokens, expected {size}: use more text")
    return tokens


def tokenizer_config(first: int, model_max_length: int) -> dict[str, object]:
    """Returns the content of tokenizer_config.json for control slots that start at `first`."""
    names = {offset: (name, True) for offset, name in HIDDEN_SLOTS.items()}
    names |= {offset: (name, False) for offset, name in SHOWN_SLOTS.items()}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "added_tokens_decoder": {
            str(first + offset): {"content": name, **flags, "special": special}
            for offset, (name, special) in sorted(names.items())
        },
        "additional_special_tokens": [
            name for offset, name in HIDDEN_SLOTS.items() if 2 <= offset < 254
        ],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": model_max_length,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def main() -> None:
    """Trains, writes the two files, and prints the bytes per token on held-out documents."""
    parser = argparse.ArgumentParser(
        description="Trains a byte-level vocabulary in the Kimi layout."
    )
    parser.add_argument("--data", type=Path, default=Path(".train"))
    parser.add_argument("--out", type=Path, default=Path("checkpoints/k26-tiny"))
    parser.add_argument("--vocab-size", type=int, default=4096, help="with the 256 control tokens")
    parser.add_argument("--model-max-length", type=int, default=2048)
    args = parser.parse_args()
    ranks = args.vocab_size - SPECIAL_SLOTS
    tokens = train(read_texts(args.data / "train_documents.jsonl"), ranks)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (args.out / "tiktoken.model").write_bytes(b"".join(lines))
    config = tokenizer_config(ranks, args.model_max_length)
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = load_tokenizer(args.out, args.vocab_size)
    byte_count = token_count = 0
    for text in read_texts(args.data / "heldout_documents.jsonl"):
        byte_count += len(text.encode())
        token_count += len(tokenizer.encode(text))
    print(f"{byte_count / token_count:.3f} bytes per token on {byte_count} held-out bytes")


if __name__ == "__main__":
    main()
