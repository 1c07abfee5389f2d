"""The tokenizer of the toy engines."""

from __future__ import annotations

import pytest

from runtime.toy import byte_level
from specrt.text import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_level(tmp_path_factory.mktemp("byte_level")))
