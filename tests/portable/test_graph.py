"""A portable graph runs as it is, wherever its weights lie and however large they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specrt_export.portable.graph import GraphRun, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize

pytestmark = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)


def logits(graph: Path, folder: Path) -> np.ndarray:
    run = GraphRun(graph, folder)
    run.reset(batch=1, length=32)
    return run(np.random.default_rng(0).integers(0, 8192, (1, 32)), [0], range(32))[0]


def test_a_large_graph_runs_without_copies_of_its_weights(
    draft: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = quantize(*draft, tmp_path / "q", Precision.of("int4", head="bf16"))
    for source in (draft, (made.graph, made.folder)):
        small = logits(*source)
        monkeypatch.setattr("specrt_export.portable.graph.LARGE_BYTES", 0)
        assert np.abs(small - logits(*source)).max() < 1e-4
        monkeypatch.undo()


def test_weights_behind_links_are_read_too(draft: tuple[Path, Path], tmp_path: Path) -> None:
    """Hub caches are made of links, which ONNX Runtime does not follow out of a folder."""
    (tmp_path / "model.safetensors").symlink_to(draft[1] / "model.safetensors")
    assert (logits(draft[0], tmp_path) == logits(*draft)).all()
