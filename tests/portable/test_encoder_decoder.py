"""Encoder-decoders: the contract of their graphs, their weights, and parity with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from portable.zoo import ENCODER_DECODERS, Exported
from specrt_export.check.equivalence import check_parity

pytestmark = pytest.mark.export

Zoo = Callable[[str], Exported]


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_graphs_agree_with_their_model(name: str, exported: Zoo) -> None:
    one = exported(name)
    report = check_parity(one.checkpoint, one.graph)
    assert [case.name for case in report.cases] == ["prefill", "offset", "rollback", "far"]
    assert report.error < 1e-5, report
    assert all(case.argmax_equal == case.rows for case in report.cases)
