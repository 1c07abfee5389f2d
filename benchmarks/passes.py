"""Time a bundle's target, width by width, next to a graph written by hand for the same shape.

The hand-made graph is the least that ONNX Runtime's own operators allow a Llama of this shape:
one product per projection, Q, K and V joined, gate and up too, fused norms and attention, nothing
else; no argmax, no choice of rows. Its weights are noise, which costs the same. Both run in turns
on one thread pool. With --beside the target of another bundle runs in its place.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from specrt.bundle import Bundle, ModelRecord
from specrt.engine.backends import backend_named, open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import Engine

FLOAT = TensorProto.FLOAT
ROTARY_BASE = 10000.0
BITS = {"int8": 8, "int4": 4}


class Graph:
    """Nodes and weights, as they are added."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._draw = np.random.default_rng(0)

    def add(self, op: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> str:
        """Add an operator; return its first output."""
        self.nodes.append(helper.make_node(op, inputs, outputs, **attributes))
        return outputs[0]

    def ours(self, op: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> str:
        """Add one of ONNX Runtime's own operators."""
        return self.add(op, inputs, *outputs, domain="com.microsoft", **attributes)

    def weight(self, name: str, array: NDArray[Any]) -> str:
        """Add a weight; return its name."""
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def noise(self, name: str, *shape: int) -> str:
        """Add a weight of noise."""
        return self.weight(name, self._draw.standard_normal(shape, np.float32) / 32)

    def project(self, x: str, name: str, k: int, n: int, model: ModelRecord) -> str:
        """Multiply by a weight [k, n], stored as the model's are."""
        bits, block = BITS.get(model.precision), model.block
        if bits is None:
            return self.add("MatMul", [x, self.noise(f"{name}.w", k, n)], name)
        codes = self._draw.integers(0, 256, (n, k // block, block * bits // 8), np.uint8)
        scales = np.full((n, k // block), 1e-3, np.float32)
        inputs = [x, self.weight(f"{name}.w", codes), self.weight(f"{name}.s", scales)]
        return self.ours(
            "MatMulNBits", inputs, name, K=k, N=n, bits=bits, block_size=block, accuracy_level=4
        )


def hand_made(model: ModelRecord, hidden: int, inner: int, length: int) -> ModelProto:
    """Return the graph of a Llama with the model's shape and precision."""
    g, size = model.geometry, model.geometry.memories[0].key_width
    graph = Graph()
    turns = np.outer(np.arange(length), ROTARY_BASE ** (-np.arange(0, size, 2) / size))
    graph.weight("cos", np.cos(turns).astype(np.float32))
    graph.weight("sin", np.sin(turns).astype(np.float32))
    residual = graph.add("Gather", [graph.noise("table", g.vocab_size, hidden), "input_ids"], "x")
    ones = graph.weight("ones", np.ones(hidden, np.float32))
    normed = graph.add("SimplifiedLayerNormalization", [residual, ones], "normed", axis=-1)
    for i in range(g.layers):
        residual, normed = _layer(graph, model, i, residual, normed, hidden, inner)
    logits = graph.project(normed, "logits", hidden, g.vocab_size, model)
    buffers = {n: (1, one.heads, length, one.width) for n, one in g.buffers.items()}
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "width"]),
        helper.make_tensor_value_info("past", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("total", TensorProto.INT32, []),
        *(helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in buffers.items()),
    ]
    outputs = [helper.make_tensor_value_info(logits, FLOAT, [1, "width", g.vocab_size])]
    outputs += [
        helper.make_tensor_value_info(f"new.{name}", FLOAT, shape)
        for name, shape in buffers.items()
    ]
    made = helper.make_graph(graph.nodes, "hand_made", inputs, outputs, graph.weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


def _layer(
    graph: Graph, model: ModelRecord, i: int, residual: str, x: str, hidden: int, inner: int
) -> tuple[str, str]:
    """Add one layer; return its residual stream, and that normed for the next."""
    heads, one = model.geometry.heads, model.geometry.memories[i]
    queries, keys = heads * one.key_width, one.kv_heads * one.key_width
    qkv = graph.project(x, f"qkv.{i}", hidden, queries + 2 * keys, model)
    past = [f"key.{i}", f"value.{i}", "past", "total", "cos", "sin"]
    seen = graph.ours(
        "GroupQueryAttention",
        [qkv, "", "", *past],
        f"seen.{i}",
        f"new.key.{i}",
        f"new.value.{i}",
        num_heads=heads,
        kv_num_heads=one.kv_heads,
        do_rotary=1,
    )
    out = graph.project(seen, f"out.{i}", queries, hidden, model)
    norm = "SkipSimplifiedLayerNormalization"
    sides = ["", ""]
    x = graph.ours(norm, [out, residual, "ones"], f"middle.{i}", *sides, f"after.{i}", epsilon=1e-5)
    both = graph.project(x, f"gate_up.{i}", hidden, 2 * inner, model)
    graph.add("Split", [both], f"gate.{i}", f"up.{i}", axis=-1, num_outputs=2)
    graph.ours("QuickGelu", [f"gate.{i}"], f"silu.{i}", alpha=1.0)
    graph.add("Mul", [f"silu.{i}", f"up.{i}"], f"inner.{i}")
    down = graph.project(f"inner.{i}", f"down.{i}", inner, hidden, model)
    x = graph.ours(
        norm, [down, f"after.{i}", "ones"], f"last.{i}", *sides, f"residual.{i}", epsilon=1e-5
    )
    return f"residual.{i}", x


def hand_made_pass(
    model: ModelRecord, session: ort.InferenceSession, length: int, width: int, filled: int
) -> Callable[[], None]:
    """Bind the hand-made graph for one width; return what runs it."""
    g = model.geometry
    binding = session.io_binding()
    # Bound by address: they live as long as what is returned.
    kept: dict[str, NDArray[Any]] = {
        "input_ids": np.zeros((1, width), np.int64),
        "past": np.array([filled + width - 1], np.int32),
        "total": np.array(filled + width, np.int32),
    }
    kept |= g.filled(1, length)
    for name, array in kept.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        if array.ndim == 4:
            given = ("cpu", 0, array.dtype, array.shape, array.ctypes.data)
            binding.bind_output(f"new.{name}", *given)
    logits = np.zeros((1, width, g.vocab_size), np.float32)
    binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)

    def run(kept: object = (kept, logits)) -> None:
        session.run_with_iobinding(binding)

    return run


def bundle_pass(engine: Engine, width: int, filled: int, rows: int) -> Callable[[], None]:
    """Return what runs the bundle's target once, scoring its last rows."""
    tokens = np.zeros((1, width), np.int64)

    def run() -> None:
        engine.forward(tokens, filled, rows)

    return run


def in_turns(passes: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Return the median milliseconds of each, one after the other in every repeat."""
    took: list[list[int]] = [[] for _ in passes]
    for _ in range(repeats + 3):
        for run, times in zip(passes, took, strict=True):
            run()  # the one that counts finds its own weights in the caches, as in decoding
            began = perf_counter_ns()
            run()
            times.append(perf_counter_ns() - began)
    return [median(times[3:]) / 1e6 for times in took]


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundle", type=Path)
    rival = parser.add_mutually_exclusive_group(required=True)
    rival.add_argument(
        "--checkpoint", type=Path, help="of the target: sizes of the hand-made graph"
    )
    rival.add_argument(
        "--beside", type=Path, help="a bundle whose target runs instead of that graph"
    )
    parser.add_argument("--widths", default="1,2,3,5,9")
    parser.add_argument("--filled", type=int, default=200, help="positions in the cache")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def open_target(bundle: Bundle, threads: int) -> Engine:
    """Open the target of a bundle."""
    return open_engine(replace(EngineSpec.of(bundle, bundle.manifest.target, threads), batch=1))


def rival_graph(given: argparse.Namespace, bundle: Bundle) -> Callable[[int], Callable[[], None]]:
    """Return what makes a pass of some width of the graph written by hand."""
    model, length = bundle.manifest.target, bundle.manifest.max_length
    sizes = json.loads((given.checkpoint / "config.json").read_text())
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    made = hand_made(model, sizes["hidden_size"], sizes["intermediate_size"], length)
    session = ort.InferenceSession(made.SerializeToString(), options, ["CPUExecutionProvider"])
    return lambda width: hand_made_pass(model, session, length, width, given.filled)


def rival_bundle(given: argparse.Namespace) -> Callable[[int], Callable[[], None]]:
    """Return what makes a pass of some width of the other bundle's target."""
    engine = open_target(Bundle.open(given.beside), given.threads)
    return lambda width: bundle_pass(engine, width, given.filled, width)


def main() -> None:
    """Measure and print a table, then a line of JSON."""
    given = arguments().parse_args()
    bundle = Bundle.open(given.bundle)
    manifest, model = bundle.manifest, bundle.manifest.target
    backend_named("ort-cpu").share_threads(given.threads)
    engine = open_target(bundle, given.threads)
    print(f"{manifest.name}: {model.parameters / 1e6:.0f} M parameters, {model.precision}")
    if given.beside is not None:
        name, rival = "beside", rival_bundle(given)
    else:
        name, rival = "hand-made", rival_graph(given, bundle)
    print(f"| width | {name} ms | engine ms | ratio |\n|" + " --- |" * 4)
    rows = []
    for width in map(int, given.widths.split(",")):
        passes = [rival(width), bundle_pass(engine, width, given.filled, width)]
        other, own = in_turns(passes, given.repeats)
        print(f"| {width} | {other:.2f} | {own:.2f} | {own / other:.2f} |")
        rows.append({"width": width, f"{name}_ms": other, "engine_ms": own})
    print(json.dumps({"bundle": manifest.name, "filled": given.filled, "passes": rows}))


if __name__ == "__main__":
    main()
