"""Writes a small tokenizer in Kimi's files: 256 bytes, a few merges, 256 control tokens."""

import base64
import json
from pathlib import Path

MERGES = [b"he", b"ll", b"hell", b" t", b"##", b"\xf0\x9f", b"\x98\x80", b"\xe4\xb8", b"END"]
RANKS = [bytes([value]) for value in range(256)] + MERGES
FIRST = len(RANKS)
NAMED = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    22: ("<think>", False),
    23: ("</think>", False),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}


def write_folder(folder: Path, ranks: list[bytes] = RANKS, **config) -> Path:
    """Writes tiktoken.model and tokenizer_config.json; `config` replaces fields of the latter."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_text("".join(lines))
    content = {
        "added_tokens_decoder": {
            str(len(ranks) + offset): {"content": name, "special": special}
            for offset, (name, special) in NAMED.items()
        },
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content | config))
    return folder
