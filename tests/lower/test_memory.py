"""Compiling takes memory for a slice of a weight, not for a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from specrt_export.portable.external_data import external_tensors
from specrt_export.portable.graph import read_graph

MIB = 1 << 20
VOCABULARY = 600_000

MEASURED = r"""
import re, sys
from pathlib import Path
from specrt_export.lower import lazy_tensor as engine_file
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu

def peak():
    # Not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10

graph, out = (Path(a) for a in sys.argv[1:3])
engine_file.SLICE_BYTES = int(sys.argv[3]) or engine_file.SLICE_BYTES
before = peak()
compiled = compile_ort_cpu(graph, graph.parent, out, 64)
print(peak() - before, compiled.weight_bytes)
"""
# A slice in bf16 and fp32, and what ONNX Runtime takes to look at a graph without weights.
MOST = 120 * MIB


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


def growth(graph: Path, out: Path, slice_bytes: int = 0) -> tuple[int, int]:
    """Return the bytes by which a process that compiles grows, and those of the weights."""
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(graph), str(out), str(slice_bytes)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    grown, written = (int(part) for part in ran.stdout.split())
    return grown, written


def test_the_measure_sees_a_table_that_is_whole_in_memory(large: Path, tmp_path: Path) -> None:
    grown, _ = growth(large, tmp_path / "engine", 1 << 40)
    assert grown > MOST


def test_a_model_larger_than_memory_compiles(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    grown, written = growth(large, out)
    assert written >= VOCABULARY * 128 * 4
    assert grown < MOST
    engine = onnx.load(out / "engine.onnx", load_external_data=False)
    tables = [t for t in engine.graph.initializer if list(t.dims) == [VOCABULARY, 128]]
    assert len(tables) == 1, "the table that is also the last projection is stored once"
