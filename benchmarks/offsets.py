"""Time products with int4 weights that have zeros or minimums, beside those that have neither.

    python benchmarks/offsets.py [--block 32] [--rows 1,5,9] [--threads 1] [--library OTHER.so]

Weights are random bytes: 26 matrices of 2,048 x 2,048, which no cache holds, multiplied one after
another; formats take turns. Least times and lower quartiles: a thread that is held up says nothing
about a kernel.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from specrt.engine.ort import kernels
from specrt.engine.ort.ort_engine import silent_options

SIZE, MATRICES = 2048, 26
FORMATS = {"int4": 2.0, "int4-zeros": 2.5, "int4-minimums": 4.0}
"""Bytes beside a block of one output, scales in fp16."""


def open_products(format_: str, block: int, threads: int, library: Path) -> ort.InferenceSession:
    """Open a graph of products that read one input."""
    rng = np.random.default_rng(0)
    block_bytes = block / 2 + FORMATS[format_]
    weights = [
        rng.integers(0, 100, int(SIZE * SIZE / block * block_bytes), np.uint8)
        for _ in range(MATRICES)
    ]
    nodes = [
        helper.make_node(
            "MatMul", ["x", f"w{i}"], [f"y{i}"], domain="specrt", N=SIZE, K=SIZE,
            block_size=block, format=format_, activation="none", exact=0, norm="none", epsilon=0.0,
        )
        for i in range(MATRICES)
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", SIZE])],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(MATRICES)],
        [
            helper.make_tensor(f"w{i}", TensorProto.UINT8, w.shape, w.tobytes(), raw=True)
            for i, w in enumerate(weights)
        ],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("specrt", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = silent_options()
    if library != kernels.KERNELS:
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library))
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def main() -> None:
    """Print a row for each number of rows and format."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--rows", default="1,5,9")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=80)
    parser.add_argument("--library", type=Path, default=kernels.KERNELS)
    given = parser.parse_args()
    opened = {
        name: open_products(name, given.block, given.threads, given.library) for name in FORMATS
    }
    for rows in map(int, given.rows.split(",")):
        x = np.random.default_rng(1).standard_normal((rows, SIZE)).astype(np.float32)
        times: dict[str, list[int]] = {name: [] for name in FORMATS}
        for _ in range(given.turns):
            for name, session in opened.items():
                begin = perf_counter_ns()
                session.run(None, {"x": x})
                times[name].append(perf_counter_ns() - begin)
        least, low = min(times["int4"]), lower_quartile(times["int4"])
        for name, taken in times.items():
            size = (given.block / 2 + FORMATS[name]) / (given.block / 2 + FORMATS["int4"])
            print(
                f"{rows} rows, {name}: least {min(taken) / 1e6:.2f} ms, "
                f"{min(taken) / least:.3f} of int4's; lower quartile "
                f"{lower_quartile(taken) / low:.3f}; bytes {size:.3f}"
            )


def lower_quartile(taken: list[int]) -> int:
    """Return what a quarter of the turns is not above."""
    return sorted(taken)[len(taken) // 4]


if __name__ == "__main__":
    main()
