"""Servers that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import specrt
from scheduler.support import rows
from serve.support import Live, serving
from specrt.text.tokenizer import Tokenizer
from support.rows import packed


@pytest.fixture(scope="module")
def toy(tokenizer: Tokenizer) -> Iterator[Live]:
    """Toy engines of four rows; a token is a byte."""
    with serving(rows(packed, 4, tokenizer, eos_token_ids=[263])) as live:
        yield live


@pytest.fixture(scope="module")
def real(codelet: Path) -> Iterator[Live]:
    """Codelet, on one core."""
    with serving(specrt.load(codelet, threads=1), "codelet") as live:
        yield live
