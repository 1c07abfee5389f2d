"""Graphs of the CPU kernels: a row comes to the same bits at every width and in any company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from lower.lowering import Case, Lowering, lowered
from portable.zoo import MODELS, NEIGHBOURS, ODD, Exported, matrix
from quantize.graphs import FORMATS, in_codes
from specrt.engine.ort.ort_engine import silent_options
from specrt.errors import BuildError
from specrt_export.compile.compiler import GraphSource
from specrt_export.lower.lazy_tensor import ENGINE
from specrt_export.portable.external_data import map_weights
from specrt_export.portable.graph import read_graph, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize
from support.kernels import without_kernels

Array = NDArray[Any]

pytestmark = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)

LENGTH = 37
"""Positions: more than two groups of keys, and no multiple of one."""

PRECISIONS = ("fp32", "bf16", "int8", "int4")
WIDTHS = (*range(2, 9), 19)


class Graph:
    """A lowered graph over buffers that hold no number where nothing was written."""

    def __init__(self, path: Path, threads: int) -> None:
        options = silent_options()
        options.intra_op_num_threads = threads
        self._session = ort.InferenceSession(path, options, ["CPUExecutionProvider"])
        self._buffers = {
            i.name: np.full(i.shape, np.nan, np.float32)
            for i in self._session.get_inputs()
            if "." in i.name
        }
        self._names = [o.name for o in self._session.get_outputs()]

    def score(self, tokens: Array, rows: Sequence[int]) -> list[Array]:
        """Run the first tokens of row 0; return what some of them come to."""
        feeds = {
            "input_ids": tokens[None], "slots": np.zeros_like(tokens),
            "positions": np.arange(len(tokens)), "rows": np.array(rows),
        }  # fmt: skip
        found = dict(zip(self._names, self._session.run(None, feeds | self._buffers), strict=True))
        return [value[0] for name, value in found.items() if "." not in name]

    def run(self, places: Sequence[tuple[int, int, Array]]) -> list[list[Array]]:
        """Run a pass of some (row, start, tokens); return what each comes to, of every token."""
        feeds = {
            "input_ids": np.concatenate([tokens for _, _, tokens in places])[None],
            "slots": np.concatenate([np.full(len(t), row) for row, _, t in places]),
            "positions": np.concatenate([np.arange(at, at + len(t)) for _, at, t in places]),
        }
        feeds["rows"] = np.arange(feeds["input_ids"].size)
        found = dict(zip(self._names, self._session.run(None, feeds | self._buffers), strict=True))
        for name in self._buffers:
            self._buffers[name] = found.pop(f"present_{name}")
        ends = np.cumsum([len(tokens) for _, _, tokens in places])[:-1]
        parts = zip(*(np.split(value[0], ends) for value in found.values()), strict=True)
        return [list(part) for part in parts]


@pytest.mark.export
@pytest.mark.parametrize(
    ("name", "precision"),
    matrix([*MODELS, *NEIGHBOURS, *(f"{name}-odd" for name in ODD)], PRECISIONS, ["int8"]),
)
def test_a_row_has_the_same_bits_at_every_width_and_in_company(
    exported: Callable[[str], Exported], tmp_path: Path, name: str, precision: str
) -> None:
    one = exported(name)
    path = {}
    for batch in (1, 3):
        how = Lowering("ort-cpu", precision, batch=batch)
        case = lowered(
            *one.source, tmp_path / str(batch), how, max_length=LENGTH, prefill=WIDTHS[-1]
        )
        path[batch] = case.lowered.folder / ENGINE
    rng = np.random.default_rng(0)
    texts = rng.integers(0, one.geometry.vocab_size, (3, LENGTH))
    alone, wide = Graph(path[1], threads=1), Graph(path[1], threads=2)
    expected = []
    for text in texts:
        steps = [alone.run([(0, i, text[i : i + 1])])[0] for i in range(LENGTH)]
        expected.append([np.concatenate(values) for values in zip(*steps, strict=True)])
        assert np.isfinite(expected[-1][0]).all()
    for width in WIDTHS:
        for at in range(0, LENGTH, width):
            (found,) = wide.run([(0, at, texts[0, at : at + width])])
            hold_same(found, expected[0], at, f"width {width} at {at}")
    company, lengths = Graph(path[3], threads=2), [0, 0, 0]
    while min(lengths) < LENGTH:
        places = []
        for row in rng.permutation(3).tolist():
            width = int(min(rng.integers(0, 9), LENGTH - lengths[row]))
            if width:
                begin = lengths[row]
                places.append((row, begin, texts[row, begin : begin + width]))
                lengths[row] += width
        for (row, at, _), found in zip(places, company.run(places) if places else [], strict=True):
            hold_same(found, expected[row], at, f"row {row} of {len(places)} at {at}")


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


def hold_same(found: Sequence[Array], expected: Sequence[Array], at: int, what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other[at : at + len(one)]), what
