"""The gate measures what it says: divergence and agreement on a text, and where they come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import softmax
from scipy.stats import entropy

from quantize.graphs import geometry
from specrt.geometry import Geometry
from specrt_export.check.quality import measure, sensitivities
from specrt_export.portable.graph import Logits, Tokens, divergences, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)


class Table:
    """A model whose logits depend on the last token and its position, and on some noise."""

    def __init__(self, noise: float = 0.0, vocab: int = 50) -> None:
        self.geometry: Geometry = geometry(vocab)
        random = np.random.default_rng(0)
        self._logits = random.standard_normal((100, vocab)).astype(np.float32) * 3
        self._logits += noise * np.random.default_rng(1).standard_normal(self._logits.shape)
        self.widest = 0

    def __call__(self, tokens: Tokens, start: int) -> Logits:
        self.widest = max(self.widest, len(tokens))
        return self._logits[tokens] + np.arange(start, start + len(tokens))[:, None] % 3


PIECES = [np.arange(37) % 50, np.arange(20)]


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_divergence_is_scipys(seed: int) -> None:
    random = np.random.default_rng(seed)
    one, other = (random.standard_normal((5, 40)).astype(np.float32) * 4 for _ in "pq")
    expected = entropy(softmax(one.astype(float), -1), softmax(other.astype(float), -1), axis=-1)
    assert divergences(one, other) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_token_that_cannot_be_adds_nothing_unless_the_other_expects_it() -> None:
    one = np.array([[0, 1, -np.inf]], np.float32)
    assert divergences(one, one) == 0
    assert np.isfinite(divergences(one, np.array([[0, 1, 2]], np.float32)))
    assert divergences(np.array([[0, 1, 2]], np.float32), one) == np.inf
    assert divergences(one, np.full((1, 3), np.nan, np.float32)) == np.inf


def test_narrow_passes_measure_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(Table(), Table(0.1), PIECES)
    monkeypatch.setattr("specrt_export.check.quality.PASS_BYTES", 4 * 50 * 9)
    narrow = Table()
    found = measure(narrow, Table(0.1), PIECES)
    assert (found.kl, found.top1) == (pytest.approx(whole.kl, rel=1e-9), whole.top1)
    assert narrow.widest == 8


def text(length: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, 8192, length)


@needs_reference
def test_the_part_that_was_spoiled_hurts_most(draft: tuple[Path, Path], tmp_path: Path) -> None:
    quantized = quantize(*draft, tmp_path / "q", Precision.of("int8"))
    victim = next(
        one for one in quantized.stored if one.choice.weight.startswith("model.layers.1.")
    )
    place = {e.key: int(e.value) for e in victim.tensors[1].external_data if e.key != "location"}
    with (quantized.folder / "weights.data").open("r+b") as file:
        file.seek(place["offset"])
        file.write(bytes(place["length"]))
    found = sensitivities(*draft, quantized, text(40))
    assert found[0].part == "layer 1"
    assert {one.part for one in found} == {"layer 0", "layer 1", "embedding and head"}
    assert found[0].kl > 20 * found[1].kl
