"""What the C interface calls besides completions: ids and texts, processors, errors as numbers."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from specrt import c_host
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def host(codelet: Path) -> Iterator[c_host.Host]:
    status, opened = c_host.open_bundle(os.fsencode(codelet), b"", 1, 0, 0, 1)
    assert status == 0
    yield opened
    assert opened.close() == (0,)


def test_texts_become_ids_and_back(host: c_host.Host, generator: Generator) -> None:
    target = generator.models.target
    sizes = target.max_length, target.geometry.vocab_size
    assert host.info()[:10] == (0, b"codelet", b"ort-cpu", b"fp32", *sizes, 1, 8, 1, 1)
    text = "żółw = 1\n"
    status, ids = host.encode(text.encode())
    tokens = generator.tokenizer.encode(text)
    assert (status, list(memoryview(ids).cast("q"))) == (0, tokens)
    assert host.decode(ids) == (0, text.encode())
    for prompt, is_text in ((ids, 0), (text.encode(), 1)):
        asked = b'{"params": {"max_tokens": 1}, "gamma": -1, "drafter": "ngram"}'
        stats = host.begin(prompt, is_text, asked)[1].stats()
        assert (stats[1], *stats[12:14]) == (len(tokens), -1, b"ngram")


def test_errors_are_told_with_their_status(host: c_host.Host, tmp_path: Path) -> None:
    size = host.info()[5]
    context = array("q", [5] * (host.info()[4] + 1)).tobytes()
    for status, said, told in (
        (1, b"temperature is -1", host.begin(b"x", 1, b'{"params": {"temperature": -1}}')),
        (1, b"drafter", host.begin(b"x", 1, b'{"params": {}, "drafter": "models"}')),
        (1, b"not UTF-8 at byte 0", host.encode(b"\xff")),
        (1, b"vocabulary", host.decode(array("q", [size]).tobytes())),
        (6, b"the context of this bundle", host.begin(context, 0, b'{"params": {}}')),
        (4, b"is not a bundle", c_host.open_bundle(os.fsencode(tmp_path), b"", 0, 0, 0, 1)),
        (1, b"runs " + sys.executable.encode(), c_host.open_bundle(b"x", b"/no", 0, 0, 0, 1)),
    ):
        assert told[0] == status, told
        assert said in told[1], told


@pytest.mark.parametrize("text", ["", "the arena is full"])
def test_a_shortage_of_memory_has_a_status(
    host: c_host.Host, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    error = EngineError("a pass failed")
    error.__cause__ = RuntimeError(f"std::bad_alloc: {text}")
    for raised in (MemoryError(text), error):
        monkeypatch.setattr(Tokenizer, "encode", Mock(side_effect=raised))
        status, told = host.encode(b"x")
        assert status == c_host.MEMORY
        assert str(raised).encode() in told or b"not enough memory" in told
