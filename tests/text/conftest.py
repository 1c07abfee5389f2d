"""Tokenizers whose tokens are bytes."""

from __future__ import annotations

import pytest

from specrt.text.tokenizer import Tokenizer
from support.toy import STYLES, sentencepiece


@pytest.fixture(scope="session")
def spelled(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """Tokenizers whose tokens are bytes, each in the style of some checkpoints."""
    made = [Tokenizer(sentencepiece(tmp_path_factory.mktemp(style), style)) for style in STYLES]
    return [tokenizer, *made]
