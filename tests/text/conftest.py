"""Tokenizers that the tests of text share."""

from pathlib import Path

import pytest
from kimi_folder import write_folder

from k26jax.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("kimi")))


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    return Path(__file__).resolve().parents[2] / "checkpoints"


@pytest.fixture(scope="session")
def trained(checkpoints) -> Tokenizer:
    """The tokenizer of the small trained model."""
    return load_tokenizer(checkpoints / "k26-tiny", vocab_size=4096)
