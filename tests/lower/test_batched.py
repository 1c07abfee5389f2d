"""Engines of several rows: each at its own length, rolled back by itself, equal to the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest

from specrt.engine import Engine, open_engine
from specrt.errors import BuildError
from specrt_export.compile.ort_cpu import CompiledModel, compile_ort_cpu
from specrt_export.lower import bounded
from specrt_export.lower.view import GraphView
from specrt_export.portable import GraphRun, runs_here

if TYPE_CHECKING:
    from export.zoo import Exported

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
MAX_LENGTH = 64
ROTATED = {"gpt2": 0, "opt": 0, "smollm3": 1}
"""Layers of 2 that rotate, where it is not both."""


def passes(batch: int) -> list[tuple[list[int], int]]:
    """Return (start, width) of passes: a prefill, ragged ones, rows rolled back, a full buffer."""
    rows = np.arange(batch)
    starts = [0 * rows, 20 - 3 * rows, 23 - 3 * rows, 10 + rows, 4 * rows, 15 + rows, 35 - rows]
    widths = [20, 3, 1, 5, 2, 20, 20]
    last = np.full(batch, MAX_LENGTH - 12)
    return [
        *((start.tolist(), width) for start, width in zip(starts, widths, strict=True)),
        (last.tolist(), 12),
    ]


def compare(one: Exported, engine: Engine, batch: int) -> float:
    """Run the passes with engine and portable graph; return the largest relative error."""
    reference = GraphRun(one.graph.path, one.checkpoint.folder)
    reference.reset(batch, MAX_LENGTH)
    rng = np.random.default_rng(0)
    errors = []
    for start, width in passes(batch):
        tokens = rng.integers(0, one.graph.geometry.vocab_size, (batch, width))
        wanted, best = reference(tokens, start, range(width))
        made = engine.forward(tokens, start)
        np.testing.assert_array_equal(made.argmax, best)
        errors.append(np.abs(made.logits - wanted).max() / (wanted.max() - wanted.min()))
    return float(max(errors))


def opened(folder: Path, compiled: CompiledModel, batch: int) -> Engine:
    return open_engine(
        "ort-cpu",
        folder / "engine.onnx",
        compiled.geometry,
        batch=batch,
        max_length=MAX_LENGTH,
        max_width=32,
        threads=1,
    )


def built(one: Exported, folder: Path, batch: int) -> tuple[CompiledModel, float]:
    graph, checkpoint = one.graph.path, one.checkpoint.folder
    compiled = compile_ort_cpu(graph, checkpoint, folder, MAX_LENGTH, batch=batch)
    engine = opened(folder, compiled, batch)
    error = compare(one, engine, batch)
    engine.close()
    return compiled, error


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize(
    "name", ["llama3", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox", "smollm3", "opt"]
)
def test_rows_of_their_own_lengths_are_equal(
    name: str, batch: int, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    compiled, error = built(exported(name), tmp_path, batch)
    assert error < 1e-5
    rotated = ROTATED.get(name, 2)
    assert compiled.fused["attention"] == "2/2"
    assert compiled.fused["rotary"] == f"{rotated}/{2 if rotated else 0}"
    engine = onnx.load(tmp_path / "engine.onnx", load_external_data=False)
    found = [n.op_type for n in engine.graph.node]
    assert found.count("RotaryEmbedding") == 2 * rotated
    assert found.count("TensorScatter") == 4
    # Keys and values up to the longest row, and nothing else, are cut.
    assert found.count("Slice") == 4
    assert {o.domain: o.version for o in engine.opset_import}[""] == 24


@needs_reference
@pytest.mark.export
def test_attention_reads_no_further_than_the_longest_row(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    one = exported("llama3")
    compiled, _ = built(one, tmp_path, 2)
    engine = opened(tmp_path, compiled, 2)
    tokens = np.ones((2, 3), np.int64)
    clean = engine.forward(tokens, [0, 2]).logits.copy()
    caches = engine._caches  # type: ignore[attr-defined]
    for cache in caches.values():
        cache[:, :, 5:] = np.nan  # a mask would let these through: NaN + -inf is NaN
    np.testing.assert_array_equal(engine.forward(tokens, [0, 2]).logits, clean)
    engine.close()


@needs_reference
@pytest.mark.export
def test_an_extent_that_forgets_the_longest_row_is_found(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = bounded._extent

    def shortest(view: GraphView) -> str:
        name = extent(view)
        for node in view.nodes("ReduceMax"):
            node.op_type = "ReduceMin"
        return name

    monkeypatch.setattr(bounded, "_extent", shortest)
    with pytest.raises(AssertionError):
        built(exported("llama3"), tmp_path, 2)


def test_an_older_library_is_told_for_how_many_rows_it_is_too_old(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt_export.compile.ort_cpu.runs_here", lambda: False)
    folder = engines / "codelet"
    with pytest.raises(BuildError, match=r"an engine of 2 rows needs ONNX Runtime 1\.25"):
        compile_ort_cpu(
            folder / "portable" / "draft.onnx",
            folder / "checkpoint" / "draft",
            tmp_path,
            MAX_LENGTH,
            batch=2,
        )
