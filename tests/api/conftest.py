"""A generator over toy engines, of one row and of two."""

from __future__ import annotations

import pytest

from scheduler.support import rows, toys
from specrt.generator import Generator
from specrt.text.tokenizer import Tokenizer
from support.rows import packed
from support.toy import generator


@pytest.fixture(params=[1, 2])
def made(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Generator:
    """A generator whose engines have one row, or two that share passes."""
    if request.param == 1:
        return generator(*toys(tokenizer.size), tokenizer)
    return rows(packed, 2, tokenizer)
