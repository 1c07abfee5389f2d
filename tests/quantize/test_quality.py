"""The gate measures what it says: divergence and agreement on a text, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import softmax
from scipy.stats import entropy

from quantize.graphs import geometry
from specrt.bundle import Geometry
from specrt.errors import BuildError
from specrt.text import Tokenizer
from specrt_export.check.quality import GraphScorer, divergences, measure, sensitivities
from specrt_export.inputs import FEWEST, MOST, PIECE, read_calibration
from specrt_export.portable.graph import GraphRun, Logits, Tokens, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize import quantize

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
        self.fed: list[tuple[int, int]] = []

    def __call__(self, tokens: Tokens, start: int) -> Logits:
        self.fed.append((start, len(tokens)))
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


def test_a_model_is_no_distance_from_itself() -> None:
    found = measure(Table(), Table(), PIECES)
    assert (found.kl, found.top1, found.tokens) == (0.0, 1.0, 57)


def test_more_noise_is_further_away() -> None:
    found = [measure(Table(), Table(noise), PIECES) for noise in (0.01, 0.1, 1.0)]
    assert found[0].kl < found[1].kl < found[2].kl
    assert found[0].top1 >= found[1].top1 > found[2].top1


def test_narrow_passes_measure_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(Table(), Table(0.1), PIECES)
    monkeypatch.setattr("specrt_export.portable.graph.PASS_BYTES", 4 * 50 * 9)
    narrow = Table()
    found = measure(narrow, Table(0.1), PIECES)
    assert (found.kl, found.top1) == (pytest.approx(whole.kl, rel=1e-9), whole.top1)
    assert [fed for fed in narrow.fed if fed[0] == 0] == [(0, 8), (0, 8)]
    assert max(width for _, width in narrow.fed) == 8


def test_tokens_a_smaller_vocabulary_lacks_are_left_out() -> None:
    assert measure(Table(vocab=30), Table(vocab=30), PIECES).tokens == 30 + 20


@pytest.fixture(scope="module")
def tokenizer(engines: Path) -> Tokenizer:
    return Tokenizer(engines / "codelet" / "checkpoint" / "target" / "tokenizer.json", 0)


def test_codelets_text_is_long_enough(engines: Path, tokenizer: Tokenizer) -> None:
    pieces = read_calibration(engines / "codelet" / "calibration.jsonl", tokenizer, 2048)
    assert [len(piece) for piece in pieces] == [PIECE] * (MOST // PIECE)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_pieces_are_spread_over_the_whole_text(
    tmp_path: Path, tokenizer: Tokenizer, suffix: str
) -> None:
    lines = [f"value_{n} = {n}\n" for n in range(3000)]
    path = tmp_path / f"text.{suffix}"
    written = "".join(
        lines if suffix == "txt" else [json.dumps({"prompt": x}) + "\n" for x in lines]
    )
    path.write_text(written, encoding="utf-8")
    pieces = read_calibration(path, tokenizer, 128)
    assert {len(piece) for piece in pieces} == {128}
    assert sum(map(len, pieces)) == MOST
    text = [tokenizer.decode(piece.tolist()) for piece in pieces]
    assert "value_1 " in text[0]
    assert "value_299" in text[-1]


def test_a_short_text_is_one_piece(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a = 1\n" * 100, encoding="utf-8")
    (piece,) = read_calibration(path, tokenizer, 2048)
    assert FEWEST <= len(piece) < PIECE


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("none.txt", None, "cannot be read: No such file"),
        ("short.txt", "x = 1\n", "comes to 5 tokens; expected 256 or more"),
        ("empty.txt", "", "comes to 0 tokens; expected 256 or more"),
        ("empty.jsonl", "\n", "holds no prompts"),
        ("wrong.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', "wrong.jsonl:2 has neither"),
        ("wrong.jsonl", "not json\n", "wrong.jsonl:1 is not JSON"),
    ],
)
def test_a_text_that_will_not_do_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, name: str, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(BuildError) as refused:
        read_calibration(tmp_path / name, tokenizer, 2048)
    said = str(refused.value)
    assert said.startswith("quality.calibration: ")
    assert str(tmp_path / name) in said
    assert told in said


def test_a_text_that_is_not_utf8_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "text.txt").write_bytes(b"caf\xe9 " * 400)
    with pytest.raises(BuildError, match="is not UTF-8"):
        read_calibration(tmp_path / "text.txt", tokenizer, 2048)


def text(length: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, 8192, length)


@needs_reference
def test_more_bits_are_nearer(engines: Path, tmp_path: Path) -> None:
    graph = engines / "codelet" / "portable" / "draft.onnx"
    folder = engines / "codelet" / "checkpoint" / "draft"
    reference = GraphScorer(GraphRun(graph, folder), 128)
    found = []
    for number, form in enumerate(
        [("bf16", 0), ("int8", 32), ("int8", 128), ("int4", 32), ("int4", 128)]
    ):
        precision = Precision.of(form[0], block=form[1])
        made = quantize(graph, folder, tmp_path / str(number), precision)
        found.append(measure(reference, GraphScorer(GraphRun(made.graph, made.folder), 128),
                             [text(128)]).kl)  # fmt: skip
    assert found[0] < 1e-9
    assert found == sorted(found)
    assert found[2] < found[3] / 10


@needs_reference
def test_the_clip_search_brings_the_model_nearer(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = engines / "codelet" / "portable" / "target.onnx"
    folder = engines / "codelet" / "checkpoint" / "target"
    lines = (engines / "codelet" / "calibration.jsonl").read_text(encoding="utf-8")
    tokens = Tokenizer(folder / "tokenizer.json", 0).encode(lines)[:256]
    reference = GraphScorer(GraphRun(graph, folder), 256)

    def divergence(name: str) -> float:
        made = quantize(graph, folder, tmp_path / name, Precision.of("int4"))
        scorer = GraphScorer(GraphRun(made.graph, made.folder), 256)
        return measure(reference, scorer, [np.array(tokens)]).kl

    searched = divergence("searched")
    monkeypatch.setattr("specrt_export.quantize.codes._int4", to_the_largest)
    assert searched < 0.9 * divergence("rounded")


def to_the_largest(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """What int4 is without a search."""
    scales = np.abs(rows).max(0) / 7
    return np.rint(rows / scales).astype(np.int8), scales


@needs_reference
def test_the_part_that_was_spoiled_hurts_most(engines: Path, tmp_path: Path) -> None:
    graph = engines / "codelet" / "portable" / "draft.onnx"
    folder = engines / "codelet" / "checkpoint" / "draft"
    quantized = quantize(graph, folder, tmp_path / "q", Precision.of("int8"))
    victim = next(
        one for one in quantized.stored if one.choice.weight.startswith("model.layers.1.")
    )
    place = {e.key: int(e.value) for e in victim.tensors[1].external_data if e.key != "location"}
    with (quantized.folder / "weights.data").open("r+b") as file:
        file.seek(place["offset"])
        file.write(bytes(place["length"]))
    found = sensitivities(graph, folder, quantized, text(40))
    assert found[0].part == "layer 1"
    assert {one.part for one in found} == {"layer 0", "layer 1", "embedding and head"}
    assert found[0].kl > 20 * found[1].kl


@needs_reference
def test_no_part_is_begun_once_the_time_is_up(engines: Path, tmp_path: Path) -> None:
    graph = engines / "codelet" / "portable" / "draft.onnx"
    folder = engines / "codelet" / "checkpoint" / "draft"
    quantized = quantize(graph, folder, tmp_path / "q", Precision.of("int4"))
    found = sensitivities(graph, folder, quantized, text(8), budget_s=1.5, clock=ticking())
    assert len(found) == 2
    # What lost most of its squares comes first: both layers are int4, the tables int8.
    assert {one.part for one in found} == {"layer 0", "layer 1"}


def ticking() -> Callable[[], float]:
    """A clock that moves on by a second whenever it is read."""
    times = iter(range(1000))
    return lambda: float(next(times))


@needs_reference
def test_a_large_graph_runs_without_copies_of_its_weights(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = engines / "codelet" / "portable" / "draft.onnx"
    folder = engines / "codelet" / "checkpoint" / "draft"
    made = quantize(graph, folder, tmp_path / "q", Precision.of("int4", head="bf16"))
    for path, place in ((graph, folder), (made.graph, made.folder)):
        small = GraphScorer(GraphRun(path, place), 32)(text(32), 0)
        monkeypatch.setattr("specrt_export.portable.graph.LARGE_BYTES", 0)
        large = GraphScorer(GraphRun(path, place), 32)(text(32), 0)
        monkeypatch.undo()
        assert np.abs(small - large).max() < 1e-4


@needs_reference
def test_weights_behind_links_are_read_too(engines: Path, tmp_path: Path) -> None:
    """Hub caches are made of links, which ONNX Runtime does not follow out of a folder."""
    graph = engines / "codelet" / "portable" / "draft.onnx"
    folder = engines / "codelet" / "checkpoint" / "draft"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "model.safetensors").symlink_to(folder / "model.safetensors")
    linked = GraphScorer(GraphRun(graph, tmp_path / "cache"), 32)(text(32), 0)
    assert (linked == GraphScorer(GraphRun(graph, folder), 32)(text(32), 0)).all()
