"""Fixtures shared by the tests of the runtime."""

from __future__ import annotations

import pytest

from support.toy import byte_level
from specrt.text import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_level(tmp_path_factory.mktemp("byte_level")))
