"""A checkpoint is quantized in far less memory than its largest tensor takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantize.graphs import normal, to_bf16, write

VOCAB, WIDTH = 1 << 16, 1024
LARGEST_BYTES = 4 * VOCAB * WIDTH
"""The table as fp32, which is how arithmetic sees it."""

MEASURE = r"""
import json, os, re, sys
from pathlib import Path
from specrt_export.quantize.codes import encode
from specrt_export.precision import Precision
import specrt_export.quantize as store
from specrt_export.quantize import quantize
import numpy as np

def peak():
    # Not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10

# Every thread holds a slice.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
store.SLICE = int(sys.argv[3]) or store.SLICE
encode(np.ones((64, 1024), np.float32), "int8", 32)
before = peak()
quantize(Path(sys.argv[1]), Path(sys.argv[1]).parent, Path(sys.argv[2]), Precision.of("int8"))
print(json.dumps(peak() - before))
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph over 180 MB of bf16 weights in three shards, three quarters of them in one table."""
    part = to_bf16(normal(0, VOCAB // 16, WIDTH))
    weights = {"table": np.tile(part, (16, 1))}
    for layer in range(4):
        weights[f"up.{layer}"] = to_bf16(normal(layer, 2 * WIDTH, WIDTH))
        weights[f"down.{layer}"] = to_bf16(normal(layer, WIDTH, 2 * WIDTH))
    return write(tmp_path_factory.mktemp("sharded") / "toy", weights, shards=3)


def growth(graph: Path, out: Path, slice_items: int = 0) -> int:
    """Return the bytes by which a process that quantizes a graph grows."""
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(graph), str(out), str(slice_items)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: int = json.loads(ran.stdout)
    return found


def test_memory_does_not_grow_with_the_largest_tensor(sharded: Path, tmp_path: Path) -> None:
    # A slice is 16 MiB as fp32, and each thread holds a few forms of one.
    assert growth(sharded, tmp_path / "q") < 0.6 * LARGEST_BYTES


def test_the_measure_sees_a_tensor_that_is_whole_in_memory(sharded: Path, tmp_path: Path) -> None:
    assert growth(sharded, tmp_path / "q", VOCAB * WIDTH) > LARGEST_BYTES
