"""Codes that a checkpoint holds, in a portable graph: the weights that they stand for, as bits."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import ml_dtypes
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


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_what_the_formula_says(kind: str) -> None:
    codes = random_codes(kind, 4, 64, 16)
    numbers = codes.codes.astype(np.float64)
    if codes.format == "fp4":
        numbers = codes.codes.view(np.uint8)
        magnitude = np.where(
            numbers & 6,
            2.0 ** ((numbers >> 1 & 3) - 1.0) * (1 + (numbers & 1) / 2),
            (numbers & 1) / 2,
        )
        numbers = np.where(numbers & 8, -magnitude, magnitude)
    elif codes.format == "fp8":
        numbers = codes.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    blocks = numbers.reshape(4, -1, 16)
    if codes.zeros is not None:
        blocks = blocks - codes.zeros[..., None]
    wanted = blocks * codes.scales[..., None]
    if codes.minimums is not None:
        wanted = wanted - codes.minimums[..., None]
    assert np.array_equal(codes.floats(), wanted.reshape(4, -1).astype(np.float32))
