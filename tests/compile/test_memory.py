"""A build takes memory for slices of weights, not for a model: quantizing, lowering and writing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from shared import nightly_but
from specrt_export.portable.external_data import external_tensors
from specrt_export.portable.graph import read_graph
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize

MIB = 1 << 20
VOCABULARY, GATES = 600_000, 50_000

MEASURED = r"""
import os, re, sys
from pathlib import Path
import numpy as np
import specrt_export.quantize.quantizer as quantization
import specrt_export.quantize.weight_store as weight_store
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.lower import lazy_tensor, tiles
from specrt_export.precision import Precision
from specrt_export.checkpoint.codes import encode

def peak():
    # Not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # every thread holds a slice
work, graph, out, slices = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
lazy_tensor.SLICE_BYTES = slices or lazy_tensor.SLICE_BYTES
tiles.PIECE_BYTES = slices or tiles.PIECE_BYTES
weight_store.SLICE = slices or weight_store.SLICE
encode(np.ones((64, 1024), np.float32), "int8", 32)
before = peak()
if work.startswith("compile"):
    compile_ort_cpu(graph, graph.parent, out, 64)
else:
    quantization.quantize(graph, graph.parent, out, Precision.of("int8"))
print(peak() - before)
"""
# Slices in bf16 and fp32, and what ONNX Runtime takes to look at a graph without weights; slices
# of two threads, in a few forms each.
MOST = {"compile": 120 * MIB, "compile codes": 120 * MIB, "quantize": 180 * MIB}


@pytest.fixture
def large(engines: Path, tmp_path: Path) -> Path:
    """Codelet's draft with a table of 600,000 tokens and a layer of 50,000 gates.

    146 MiB of bf16, and three times 12, that no disk holds. Tiles are made in strips of 64
    outputs.
    """
    model = read_graph(engines / "codelet" / "portable" / "draft.onnx")
    offset = 0
    for tensor in external_tensors(model):
        if "embed_tokens" in tensor.name:
            tensor.dims[0] = VOCABULARY
        elif "layers.0.mlp" in tensor.name:
            tensor.dims["down" in tensor.name] = GATES
        size = 2 * int(np.prod(tensor.dims))
        del tensor.external_data[:]
        for key, value in (("location", "hole"), ("offset", offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        offset += size
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(offset)
    (tmp_path / "graph.onnx").write_bytes(model.SerializeToString())
    return tmp_path / "graph.onnx"


def growth(work: str, graph: Path, out: Path, slices: int = 0) -> int:
    """Return the bytes by which a process grows that does some work on a graph."""
    command = [sys.executable, "-c", MEASURED, work, str(graph), str(out), str(slices)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


@pytest.mark.parametrize("work", nightly_but(["compile codes"], MOST))
def test_a_model_larger_than_memory_is_built(large: Path, tmp_path: Path, work: str) -> None:
    out = tmp_path / "out"
    if work == "compile codes":
        precision = Precision.of("int4", embedding="int8", head="int8")
        large = quantize(large, large.parent, tmp_path / "codes", precision).graph
    assert growth(work, large, out) < MOST[work]
    if work != "quantize":
        engine = onnx.load(out / "engine.onnx", load_external_data=False)
        item = 2 if work == "compile" else 1  # bf16, or int8 with fp16 scales
        scales = 2 * (128 // Precision.of("int4").block) if item == 1 else 0
        tiles = [VOCABULARY // 16, 16 * (128 * item + scales)]
        tables = [t for t in engine.graph.initializer if list(t.dims) == tiles]
        assert len(tables) == 1, "the table that is also the last projection is stored once"
        assert (out / "engine.data").stat().st_size >= VOCABULARY * 128 * item
        # The measure sees a table that is whole in memory.
        assert growth(work, large, tmp_path / "whole", 1 << 40) > 1.5 * MOST[work]
