"""Text to token ids and back, from the files of a checkpoint folder; runs no remote code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from k26jax.errors import TokenizerError
from k26jax.text.tiktoken_model import load_tiktoken
from k26jax.text.tokenizer_json import load_tokenizer_json
from k26jax.text.vocabulary import TokenizerSettings, Vocabulary, read_settings

END_OF_TURN = "<|im_end|>"


class Tokenizer:
    """One vocabulary with its control tokens.

    Attributes:
        vocab_size: one more than the highest id.
        special_ids: name to id of every control token. Plain text never encodes to one.
        bos_name, eos_name: names of the configured begin and end tokens, or None.
        bos_id: id of the begin token, or None; `encode` never adds it.
        eos_ids: ids that end a text, the configured end token first, then `<|im_end|>` if there
            is one (Kimi's chat turns end with it whatever the configuration says).
    """

    def __init__(self, vocabulary: Vocabulary, settings: TokenizerSettings):
        self._vocabulary = vocabulary
        self._controls = frozenset(vocabulary.special_ids.values())
        self.vocab_size = len(vocabulary.table)
        self.special_ids = vocabulary.special_ids
        self.bos_name, self.eos_name = settings.bos_token, settings.eos_token
        self.bos_id = self._named_id("bos_token", settings.bos_token)
        eos_id = self._named_id("eos_token", settings.eos_token)
        turn_id = self.special_ids.get(END_OF_TURN)
        self.eos_ids = tuple(dict.fromkeys(id for id in (eos_id, turn_id) if id is not None))

    def _named_id(self, field: str, name: str | None) -> int | None:
        if name is None:
            return None
        if name not in self.special_ids:
            raise TokenizerError(
                f"tokenizer_config.json names {name!r} as {field}, which is no control token of "
                "this vocabulary; add it to added_tokens_decoder or correct the name"
            )
        return self.special_ids[name]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Returns the ids of a text, without a begin token.

        Lone surrogates, which no UTF-8 text can hold, count as U+FFFD.

        Args:
            allow_special: turn the names of control tokens into their ids. Only for text that
                this program wrote: a user's text could otherwise end its own turn.
        """
        text = replace_surrogates(text)
        if allow_special:
            return self._vocabulary.encode_marked(text)
        return self._vocabulary.encode_plain(text)

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes of one id: a control token's name, nothing for an unknown id."""
        table = self._vocabulary.table
        return table[id] if 0 <= id < len(table) else b""

    def is_special(self, id: int) -> bool:
        """Whether the id is a control token."""
        return id in self._controls

    def is_hidden(self, id: int) -> bool:
        """Whether visible text leaves this control token out.

        Follows the files' `special` flag: Kimi shows `<think>`, `</think>` and the tool-call
        markers, which the parsers behind it need, and hides the rest.
        """
        return id in self._vocabulary.hidden_ids

    def visible_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """Returns the joined bytes of all ids, hidden control tokens left out if asked."""
        hidden = self._vocabulary.hidden_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(id) for id in ids if id not in hidden)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of all ids; bytes that are not UTF-8 become U+FFFD."""
        joined = self.visible_bytes(ids, skip_special_tokens=skip_special_tokens)
        return joined.decode("utf-8", "replace")


def replace_surrogates(text: str) -> str:
    """Returns the text with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def load_tokenizer(folder: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Returns the tokenizer of a checkpoint folder.

    Reads `tiktoken.model` with `tokenizer_config.json` where there is one (Kimi), otherwise
    `tokenizer.json`, for which `tokenizer_config.json` is optional.

    Args:
        vocab_size: rows of the model's embedding, which the ids must fit.

    Raises:
        TokenizerError: a file is missing or damaged, or the vocabulary exceeds `vocab_size`.
    """
    folder = Path(folder)
    try:
        tokenizer = _read_folder(folder)
    except TokenizerError as error:
        # Readers of one file name it alone, and there may be several folders.
        raise TokenizerError(f"{folder}: {error}") from error
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, but the model's vocab_size "
            f"is {vocab_size}; the tokenizer belongs to another model"
        )
    return tokenizer


def _read_folder(folder: Path) -> Tokenizer:
    config = folder / "tokenizer_config.json"
    if (folder / "tiktoken.model").is_file():
        if not config.is_file():
            raise TokenizerError(
                "there is tiktoken.model but no tokenizer_config.json, which names its control "
                "tokens; copy that file from the model's repository"
            )
        settings = read_settings(config)
        vocabulary = load_tiktoken(folder / "tiktoken.model", settings)
    elif (folder / "tokenizer.json").is_file():
        settings = read_settings(config) if config.is_file() else TokenizerSettings()
        vocabulary = load_tokenizer_json(folder / "tokenizer.json")
    else:
        raise TokenizerError(
            "there is neither tiktoken.model nor tokenizer.json; copy the tokenizer files of the "
            "model into this folder"
        )
    return Tokenizer(vocabulary, settings)
