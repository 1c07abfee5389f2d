"""Graphs of the CPU kernels: a row comes to the same bits at every width and in any company."""

from __future__ import annotations

from pathlib import Path

import pytest

from lower.lowering import Case, Lowering
from quantize.graphs import FORMATS, in_codes
from specrt.errors import BuildError
from specrt_export.compile.compiler import GraphSource
from specrt_export.portable.external_data import map_weights
from specrt_export.portable.graph import read_graph, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize
from support.kernels import without_kernels

pytestmark = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)

MIXED = [
    Precision.of("int4", block=128),
    Precision.of("int4", embedding="bf16", head="int8", block=64),
    Precision.of("int8", embedding="int4", head="fp16"),
    Precision.of("int8", per_row=True),
    Precision.of("fp8"),
    Precision.of("fp8", per_row=True),
]


@pytest.mark.parametrize("precision", MIXED, ids=lambda p: "-".join((*p.names, str(p.block))))
def test_weights_are_stored_in_any_mixture(
    draft: tuple[Path, Path], tmp_path: Path, precision: Precision
) -> None:
    made = quantize(*draft, tmp_path / "stored", precision)
    source = GraphSource(made.graph, made.folder)
    compiler = Lowering("ort-cpu").compiler()
    case = Case(source, compiler.lower(source, tmp_path / "lowered"), compiler)
    assert case.error() <= Lowering("ort-cpu").error
    taken, of = map(int, case.lowered.fused["quantized"].split("/"))
    assert taken == of > 0


@pytest.mark.parametrize("kind", FORMATS)
def test_codes_of_any_kind_are_multiplied_and_looked_up(
    draft: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    path = in_codes(*draft, tmp_path / "stored", kind, 32)
    source, compiler = GraphSource(path, path.parent), Lowering("ort-cpu").compiler()
    case = Case(source, compiler.lower(source, tmp_path / "lowered"), compiler)
    assert case.error() <= Lowering("ort-cpu").error
    taken, of = map(int, case.lowered.fused["quantized"].split("/"))
    assert taken == of > 0
    bytes_ = (tmp_path / "lowered" / "engine.data").stat().st_size
    weights = sum(w.array.size for w in map_weights(read_graph(draft[0]), draft[1]))
    assert bytes_ < weights * (0.75 if "4" in kind else 1.2)


@pytest.mark.parametrize("kind", FORMATS)
def test_without_kernels_codes_are_multiplied_or_refused(
    draft: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    path = in_codes(*draft, tmp_path / "stored", kind, 32)
    source = GraphSource(path, path.parent)
    with without_kernels():
        compiler = Lowering("ort-cpu").compiler()
        if kind == "fp4" or "minimums" in kind:
            with pytest.raises(BuildError, match=r"compiler .* install specrt again"):
                compiler.lower(source, tmp_path / "lowered")
            return
        case = Case(source, compiler.lower(source, tmp_path / "lowered"), compiler)
        assert case.error() <= Lowering("ort-cpu").error
