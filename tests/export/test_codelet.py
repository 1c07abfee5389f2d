"""The bundled pair's committed graphs are what its checkpoints export to."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from specrt_export.checkpoint import Checkpoint
from specrt_export.inputs import check_vocabulary

pytestmark = pytest.mark.export
CODELET = Path(__file__).parents[2] / "engines" / "codelet"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_committed_graph_is_exported_again(role: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the export extra")
    from specrt_export.check.equivalence import check_parity
    from specrt_export.portable.exporter import export_graph, exporter

    committed = CODELET / "portable" / f"{role}.onnx"
    checkpoint = Checkpoint.open(CODELET / "checkpoint" / role)
    meta = onnx.load(committed, load_external_data=False).metadata_props
    made_by = json.loads({entry.key: entry.value for entry in meta}["specrt.exporter"])
    if made_by != exporter():
        pytest.skip(f"the committed graph was made by {made_by}, installed are {exporter()}")
    again = export_graph(checkpoint, tmp_path / "again.onnx")
    assert again.path.read_bytes() == committed.read_bytes(), (
        f"{committed} is out of date: specrt export {checkpoint.folder} --out {committed} --check"
    )
    assert check_parity(checkpoint, committed).error < 1e-5


def test_the_pair_shares_a_vocabulary() -> None:
    target, draft = (Checkpoint.open(CODELET / "checkpoint" / r) for r in ("target", "draft"))
    check_vocabulary(target, draft)
