"""Fixtures shared by the tests of the runtime."""

from __future__ import annotations

import pytest

from specrt.text import Tokenizer
from support.toy import byte_level


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_level(tmp_path_factory.mktemp("byte_level")))
