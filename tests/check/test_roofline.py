"""The kernels' benchmark: what it reports and refuses, not how fast anything is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from lower.lowering import LOWERINGS, lowered
from portable.zoo import Exported
from specrt.bundle import Bundle
from specrt.errors import EngineError, RequestError
from specrt_export.check.roofline import measure_kernels, recurrence_passes
from support.kernels import without_kernels


def test_every_width_has_times_and_limits(codelet: Path) -> None:
    found = measure_kernels(codelet, 1, laps=1, widths=(1, 5))
    assert [w.width for w in found.widths] == [1, 5]
    assert 0 < found.weight_bytes <= Bundle.open(codelet).manifest.target.weight_bytes
    assert set(found.multiply_adds) == set(found.multiply_adds_per_second)
    for width in found.widths:
        times = [width.products, width.library, width.whole, *width.attention.values()]
        assert all(t is not None and 0 < t.least_ms <= t.median_ms for t in times)
        assert width.limit_ms > 0
    columns, rows = found.table()
    assert {len(columns)} == {len(row) for row in rows}
    assert found.to_json()["kernels"] in str(found)


def test_bundles_without_kernels_are_refused(
    codelet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_kernels(), pytest.raises(EngineError, match="C\\+\\+17 compiler"):
        measure_kernels(codelet, 1, laps=1)
    with monkeypatch.context() as patch:
        patch.setattr("specrt_export.check.roofline._DOMAIN", "com.microsoft")
        with pytest.raises(RequestError, match="without CPU kernels"):
            measure_kernels(codelet, 1, laps=1)
    opened = Bundle.open(codelet)
    target = replace(opened.manifest.target, backend="tensorrt")
    other = replace(opened, manifest=replace(opened.manifest, target=target))
    monkeypatch.setattr(Bundle, "open", lambda _: other)
    with pytest.raises(RequestError, match="runs on tensorrt"):
        measure_kernels(codelet, 1, laps=1)


@pytest.mark.export
def test_recurrent_layers_run_as_in_rounds(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    case = lowered(*exported("qwen3_5").source, tmp_path, LOWERINGS["cpu"])
    geometry = case.lowered.geometry
    passes = recurrence_passes(case.model.graph, geometry, 5, 1)
    assert passes is not None
    for width in (1, 5, 1):
        passes(width)()
    assert recurrence_passes(onnx.GraphProto(), geometry, 5, 1) is None
