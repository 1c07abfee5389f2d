"""Codes that a checkpoint holds, in a portable graph: the weights that they stand for, as bits."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from quantize.graphs import FORMATS, HeldCodes, random_codes, values_of, write
from specrt_export.portable.external_data import DataFile
from specrt_export.portable.graph import read_graph, runs_here
from specrt_export.quantize.quantizer import WEIGHTS, graft
from specrt_export.quantize.weight_choice import Choice, Use
from specrt_export.quantize.weight_store import Store

pytestmark = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)

SHAPES = [(5, 96, 32), (3, 48, 16), (2, 40, 40)]
"""Rows, inputs, block: an odd number of blocks, and one of a whole row."""


def kept(weight: HeldCodes, folder: Path) -> np.ndarray:
    """Write codes as the head of a graph; return the weights that its product reads."""
    graph = read_graph(
        write(folder, {"table": np.ones((256, 64), "f4"), "head": np.ones((8, 64), "f4")})
    )
    use = Use("head/Transpose", 0, "head", False, ("head/MatMul",))
    choice = Choice("head", weight.precision, weight.block, (use,), False)
    with closing(DataFile(folder / WEIGHTS, WEIGHTS)) as file, closing(Store(file)) as store:
        graft(graph, [store.write_codes(choice, weight)])
    reader = next(node for node in graph.graph.node if node.name == use.node)
    return values_of(graph, folder, [reader.input[0]])[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_plain_onnx_runtime_makes_the_weights_bit_for_bit(
    kind: str, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    codes = random_codes(kind, *shape)
    found = kept(HeldCodes("w", codes), tmp_path)
    assert found.tobytes() == codes.floats().tobytes()
