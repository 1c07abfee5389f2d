"""Packed rows at run time: a row is what it would be alone, and what is not fed stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from engine.conftest import BATCH, MAX_LENGTH, MAX_WIDTH, Opener, alone
from specrt.engine import ort_packed
from specrt.engine.ort_packed import OrtPackedEngine
from specrt.engine.protocol import Feed, PackedEngine
from specrt.errors import EngineError

PADDED = {"pad_single_token": True, "pad_to_even": True}


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


@pytest.mark.parametrize("few", [False, True])
def test_rows_are_what_they_are_alone(
    few: bool, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all packings remembered, and with more of them than are."""
    if few:
        monkeypatch.setattr(ort_packed, "MOST_PACKINGS", 2)
        monkeypatch.setattr(ort_packed, "MOST_BINDINGS", 2)
    one, packed = opener("fp32 1"), opener()
    texts = [text_of(row) for row in range(BATCH)]
    wanted = [alone(one, text) for text in texts]
    ended = set()
    for feed, made in ragged(packed, texts, seed=few):
        end = feed.start + len(feed.tokens)
        scores = wanted[feed.row][end - feed.rows : end]
        assert made.logits.shape == (1, feed.rows, 8192)
        np.testing.assert_allclose(made.logits[0], scores, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(made.argmax[0], scores.argmax(-1))
        ended.add(end)
    assert MAX_LENGTH in ended


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_with_pads_every_bit_is_that_of_an_even_pass_alone(precision: str, opener: Opener) -> None:
    pads = {"pad_single_token": True, "pad_to_even": precision == "int8"}
    one, packed = opener(f"{precision} 1", **pads), opener(f"{precision} 3", **pads)
    assert one.max_length == packed.max_length == MAX_LENGTH - 1
    texts = [text_of(row, packed.max_length) for row in range(BATCH)]
    wanted = [alone(one, text) for text in texts]
    for feed, made in ragged(packed, texts, seed=9):
        end = feed.start + len(feed.tokens)
        np.testing.assert_array_equal(made.logits[0], wanted[feed.row][end - feed.rows : end])


def test_a_copied_row_goes_on_like_its_source(opener: Opener) -> None:
    packed = opener()
    packed.forward([text_of(row, 12) for row in range(BATCH)], 0, 1)
    packed.copy_row(0, 2, 10)
    after = text_of(7, 3)
    first, second = packed.forward_rows([Feed(0, after, 10, 3), Feed(2, after, 10, 3)])
    np.testing.assert_array_equal(first.logits, second.logits)
    for wrong in ((0, BATCH, 1), (-1, 0, 1), (0, 1, MAX_LENGTH + 1), (0, 1, -1)):
        with pytest.raises(EngineError, match="expected rows from 0 to 2"):
            packed.copy_row(*wrong)


@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ([], r"a pass was asked of rows \[\]; expected some of 0 to 2, each once"),
        ([Feed(1, [1], 0, 1), Feed(1, [1], 1, 1)], r"rows \[1, 1\]; .* each once"),
        ([Feed(0, [1] * (MAX_WIDTH + 1), 0, 1)], "a pass of 25 tokens .* widths 1 to 24"),
        ([Feed(0, [1], -1, 1)], "would write positions -1 to -1"),
        ([Feed(0, [1], 0, 1), Feed(1, [1], MAX_LENGTH - 1, 1)], "that has 0 to 94"),
        ([Feed(0, [8192], 0, 1)], "ONNX Runtime failed in a pass"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("default")
def test_wrong_feeds_are_refused_and_change_nothing(
    feeds: list[Feed], said: str, opener: Opener
) -> None:
    packed = opener(pad_single_token=True)
    fed = [Feed(row, text_of(row, 6), 0, 6) for row in range(BATCH)]
    before = [out.logits.copy() for out in packed.forward_rows(fed)]
    with pytest.raises(EngineError, match=said):
        packed.forward_rows(feeds)
    again = packed.forward_rows([Feed(1, text_of(1, 6)[4:], 4, 2)])
    np.testing.assert_array_equal(again[0].logits[0], before[1][0, 4:])


@pytest.mark.filterwarnings("default")
def test_a_pad_is_never_a_token_of_an_earlier_pass(opener: Opener) -> None:
    """A pass fails on a token that does not exist, and pads of later passes lie where it was."""
    packed = opener(**PADDED)
    for good in ([Feed(0, text_of(0, 3), 0, 3)], [Feed(1, text_of(1, 1), 0, 1)]):
        with pytest.raises(EngineError, match="ONNX Runtime failed in a pass"):
            packed.forward_rows([Feed(2, [8192] * 4, 0, 4)])
        wanted = opener(**PADDED).forward_rows(good)[0].logits
        np.testing.assert_array_equal(packed.forward_rows(good)[0].logits, wanted)


def test_only_rows_that_change_are_bound(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of them in sets of rows that come again and again."""
    packed, bound = opener(), list[str]()
    honest = ort.IOBinding.bind_input
    monkeypatch.setattr(
        ort.IOBinding,
        "bind_input",
        lambda self, name, *memory: (bound.append(name), honest(self, name, *memory))[1],
    )

    def rebound(*rows: int) -> set[int]:
        bound.clear()
        packed.forward_rows([Feed(row, [1], 0, 1) for row in rows])
        kept = [name.rpartition(".") for name in bound if name.startswith(("key.", "value."))]
        changed = {int(row) for _, _, row in kept}
        assert len(kept) == len(changed) * 2 * packed.geometry.layers, "each of them once"
        return changed

    assert rebound(0, 1, 2) == {0, 1, 2}
    assert rebound(0, 2) == {1}
    assert rebound(0, 2) == set()
    assert rebound(1, 2) == {0, 1}
    for _ in range(4):
        last = [rebound(*rows) for rows in ((0,), (1,), (2,), (0, 1, 2))]
    assert last == [set()] * 4


def test_an_engine_of_another_layout_says_what_to_do(opener: Opener) -> None:
    for batch, rows in ((1, 3), (BATCH, 2), (BATCH, 4), (BATCH, 1)):
        with pytest.raises(EngineError, match=r"[Bb]uild (the bundle|it) again"):
            opener(f"fp32 {batch}", batch=rows)


def test_a_pass_that_was_interrupted_while_it_was_bound_leaves_no_trace(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = opener()
    feeds = [Feed(row, text_of(row, 4), 0, 4) for row in range(BATCH)]
    wanted = packed.forward_rows(feeds)[1].logits.copy()
    memory_of = OrtPackedEngine._memory_of

    def interrupted(found: tuple[Any, ...]) -> Iterator[Any]:
        yield from found[:2]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            OrtPackedEngine, "_memory_of", lambda *of: (interrupted(next(memory_of(*of))), ())
        )
        with pytest.raises(KeyboardInterrupt):
            packed.forward_rows([Feed(row, text_of(row, 5), 0, 1) for row in range(BATCH)])
    np.testing.assert_array_equal(packed.forward_rows(feeds)[1].logits, wanted)
