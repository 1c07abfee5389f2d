"""Rows of several at run time: each is what it would be alone, and what is not fed stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from engine.conftest import BATCH, MAX_LENGTH, MAX_WIDTH, Opener, alone
from specrt.engine.ort import contrib_engine
from specrt.engine.protocol import Feed, PackedEngine
from specrt.errors import EngineError

KINDS = ["fp32", "int8", "int4", "fp32 contrib", "int8 contrib", "int4 contrib"]


def text_of(seed: int, length: int = MAX_LENGTH) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 8192, length).tolist()
    return found


def ragged(engine: PackedEngine, texts: Sequence[Sequence[int]], seed: int) -> Iterator[Any]:
    """Feed any rows, in any order and width, some rolled back; yield (feed, output)."""
    rng, lengths = np.random.default_rng(seed), [0] * len(texts)
    for _ in range(40):
        feeds = []
        for row in rng.permutation(len(texts))[: rng.integers(1, len(texts) + 1)].tolist():
            if lengths[row] == engine.max_length or rng.random() < 0.2:
                lengths[row] = int(rng.integers(0, lengths[row] + 1)) // 2
            begin = lengths[row]
            width = min(engine.max_length - begin, int(rng.choice([1, 1, 2, 3, 5, MAX_WIDTH])))
            fed = texts[row][begin : begin + width]
            feeds.append(Feed(row, fed, begin, int(rng.integers(1, width + 1))))
            lengths[row] += width
        yield from zip(feeds, engine.forward_rows(feeds), strict=True)


def rows(kind: str, count: int = BATCH) -> str:
    """Return the name of a compiled model with so many rows."""
    precision, _, contrib = kind.partition(" ")
    return f"{precision} {count} {contrib}".strip()


@pytest.mark.parametrize(
    ("kind", "few"), [*((kind, False) for kind in KINDS), ("fp32 contrib", True)]
)
def test_rows_are_what_they_are_alone(
    kind: str, few: bool, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all passes bound, and with more of them than are."""
    if few:
        monkeypatch.setattr(contrib_engine, "MOST_BINDINGS", 2)
    one, several = opener(rows(kind, 1)), opener(rows(kind))
    texts = [text_of(row) for row in range(BATCH)]
    wanted = [alone(one, text) for text in texts]
    ended = set()
    for feed, output in ragged(several, texts, seed=few):
        end = feed.start + len(feed.tokens)
        scores = wanted[feed.row][end - feed.rows : end]
        assert output.logits.shape == (1, feed.rows, 8192)
        np.testing.assert_array_equal(output.logits[0], scores)
        np.testing.assert_array_equal(output.argmax[0], scores.argmax(-1))
        ended.add(end)
    assert MAX_LENGTH in ended


@pytest.mark.parametrize("kind", ["fp32", "int8 contrib"])
def test_a_copied_row_goes_on_like_its_source(kind: str, opener: Opener) -> None:
    several = opener(rows(kind))
    several.forward([text_of(row, 12) for row in range(BATCH)], 0, 1)
    several.copy_row(0, 2, 10)
    after = text_of(7, 3)
    first, second = several.forward_rows([Feed(0, after, 10, 3), Feed(2, after, 10, 3)])
    np.testing.assert_array_equal(first.logits, second.logits)
    for wrong in ((0, BATCH, 1), (-1, 0, 1), (0, 1, MAX_LENGTH + 1), (0, 1, -1)):
        with pytest.raises(EngineError, match="expected rows from 0 to 2"):
            several.copy_row(*wrong)


@pytest.mark.parametrize("kind", ["fp32", "fp32 contrib"])
@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ([], r"a pass was asked of rows \[\]; expected some of 0 to 2, each once"),
        ([Feed(1, [1], 0, 1), Feed(1, [1], 1, 1)], r"rows \[1, 1\]; .* each once"),
        ([Feed(0, [1] * (MAX_WIDTH + 1), 0, 1)], "a pass of 25 tokens .* widths 1 to 24"),
        ([Feed(0, [1], -1, 1)], "would write positions -1 to -1"),
        ([Feed(0, [1], 0, 1), Feed(1, [1], MAX_LENGTH, 1)], "that has 0 to 95"),
        ([Feed(0, [1], 0, 2)], "expected 1 to 1"),
        ([Feed(0, [8192], 0, 1)], "ONNX Runtime failed in a pass"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("default")
def test_wrong_feeds_are_refused_and_change_nothing(
    feeds: list[Feed], said: str, kind: str, opener: Opener
) -> None:
    several = opener(rows(kind))
    fed = [Feed(row, text_of(row, 6), 0, 6) for row in range(BATCH)]
    before = [output.logits.copy() for output in several.forward_rows(fed)]
    with pytest.raises(EngineError, match=said):
        several.forward_rows(feeds)
    again = several.forward_rows([Feed(1, text_of(1, 6)[4:], 4, 2)])
    np.testing.assert_allclose(again[0].logits[0], before[1][0, 4:], rtol=0, atol=1e-4)


def test_buffers_of_another_shape_say_what_to_do(opener: Opener) -> None:
    for name, batch in (("fp32 1", 3), ("fp32 3", 2), ("fp32 3", 1)):
        with pytest.raises(EngineError, match=r"build the bundle again"):
            opener(name, batch=batch)
    for name in ("fp32 1", "fp32 1 contrib", "int8 1 contrib"):
        with pytest.raises(EngineError, match=r"build the bundle again"):
            opener(name, max_length=MAX_LENGTH + 20)
