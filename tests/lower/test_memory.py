"""Compiling takes memory for a slice of a weight, not for a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from specrt_export.mapped import external_tensors
from specrt_export.portable import read_graph

MIB = 1 << 20
VOCABULARY = 600_000

MEASURED = """
import resource, sys
from pathlib import Path
from specrt_export.compile.ort_cpu import compile_ort_cpu
graph, out = (Path(a) for a in sys.argv[1:])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
compiled = compile_ort_cpu(graph, graph.parent, out, 64)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(after - before, compiled.weight_bytes)
"""


@pytest.fixture
def large(engines: Path, tmp_path: Path) -> Path:
    """Codelet's draft with a table of 600,000 tokens: 146 MiB of bf16 that no disk holds."""
    model = read_graph(engines / "codelet" / "portable" / "draft.onnx")
    offset = 0
    for tensor in external_tensors(model):
        if "embed_tokens" in tensor.name:
            tensor.dims[0] = VOCABULARY
        size = 2 * int(np.prod(tensor.dims))
        del tensor.external_data[:]
        for key, value in (("location", "hole"), ("offset", offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        offset += size
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(offset)
    (tmp_path / "graph.onnx").write_bytes(model.SerializeToString())
    return tmp_path / "graph.onnx"


def test_a_model_larger_than_memory_compiles(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(large), str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    grown, written = (int(part) for part in ran.stdout.split())
    assert written >= VOCABULARY * 128 * 4
    # A slice in bf16 and fp32, and what ONNX Runtime takes to look at a graph without weights.
    assert grown * 1024 < 120 * MIB
    engine = onnx.load(out / "engine.onnx", load_external_data=False)
    tables = [t for t in engine.graph.initializer if list(t.dims) == [VOCABULARY, 128]]
    assert len(tables) == 1, "the table that is also the last projection is stored once"
