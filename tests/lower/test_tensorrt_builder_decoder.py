"""A small decoder as TensorRT gets it, and that it is a valid graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Maker:
    """A decoder of random weights, in the native form that lowering gives TensorRT."""

    def __init__(self, hidden: int, weights: str, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.ins = [("input_ids", TensorProto.INT64, [1, "S"]), ("start", TensorProto.INT64, [1])]
        self.ins += [("rows", TensorProto.INT64, ["R"])]
        self.outs: list[tuple[str, int, list[Any]]] = []
        self._chance = np.random.default_rng(seed)
        self._weights = weights
        self._hidden = hidden

    def node(self, kind: str, inputs: list[str], made: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [made], name=made, **attributes))
        return made

    def constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def norm(self, data: str, name: str) -> str:
        self.constant(f"{name}.scale", np.ones(self._hidden, np.float16))
        return self.node("RMSNormalization", [data, f"{name}.scale"], name, axis=-1, epsilon=1e-5)

    def product(self, data: str, name: str, rows: int, columns: int) -> str:
        """Weights lie as [rows, columns], followed by a Transpose, as lowering leaves them."""
        weight = f"{name}.weight"
        if self._weights == "float16":
            values = self._chance.standard_normal((rows, columns)) / np.sqrt(columns)
            self.constant(weight, values.astype(np.float16))
        else:
            codes = self._chance.integers(-127, 128, (rows, columns), dtype=np.int8)
            self.constant(f"{name}.codes", codes)
            self.constant(f"{name}.step", np.full(rows, 0.01, np.float16))
            self.node("DequantizeLinear", [f"{name}.codes", f"{name}.step"], weight, axis=0)
        turned = self.node("Transpose", [weight], f"{name}.turned", perm=[1, 0])
        return self.node("MatMul", [data, turned], name)

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "decoder",
            [helper.make_tensor_value_info(*each) for each in self.ins],
            [helper.make_tensor_value_info(*each) for each in self.outs],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 24)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def decoder(
    layers: int = 2,
    hidden: int = 256,
    heads: int = 8,
    weights: str = "float16",
    seed: int = 0,
    vocabulary: int = 256,
    positions: int = 128,
) -> onnx.ModelProto:
    made, size, shared = Maker(hidden, weights, seed), hidden // heads, heads // 2
    _places(made, positions, size)
    chance = np.random.default_rng(seed + 1)
    embedding = chance.standard_normal((vocabulary, hidden)).astype(np.float16)
    hidden_state = made.node("Gather", [made.constant("embed", embedding), "input_ids"], "x")
    made.constant("split.q", np.array([0, 0, heads, size]))
    made.constant("split.k", np.array([0, 0, shared, size]))
    made.constant("joined", np.array([0, 0, hidden]))
    for at in range(layers):
        hidden_state = _layer(made, f"{at}", hidden_state, hidden, size, shared, positions)
    last = made.norm(hidden_state, "last")
    made.node("Gather", [last, "rows"], "picked", axis=1)
    made.node("Cast", [made.product("picked", "head", vocabulary, hidden)], "logits", to=1)
    made.node("ArgMax", ["logits"], "argmax", axis=-1, keepdims=0)
    made.outs[:0] = [
        ("logits", TensorProto.FLOAT, [1, "R", vocabulary]),
        ("argmax", TensorProto.INT64, [1, "R"]),
    ]
    return made.model()


def _places(made: Maker, positions: int, size: int) -> None:
    """Positions, and an additive mask of what each of them sees."""
    for name, value in (("zero", 0), ("one", 1)):
        made.constant(name, np.int64(value))
    made.constant("last axis", np.array([1], np.int64))
    made.constant("axes", np.array([1, 3], np.int64))
    made.constant("all", np.arange(positions, dtype=np.int64).reshape(1, 1, 1, -1))
    made.node("Shape", ["input_ids"], "sizes", start=1, end=2)
    made.node("Range", ["zero", made.node("Squeeze", ["sizes"], "width"), "one"], "steps")
    made.node("Add", [made.node("Unsqueeze", ["start", "last axis"], "from"), "steps"], "places")
    made.node("LessOrEqual", ["all", made.node("Unsqueeze", ["places", "axes"], "at")], "seen")
    made.constant("yes", np.float16(0))
    made.constant("no", np.float16(-65504))
    made.node("Where", ["seen", "yes", "no"], "mask")
    angles = np.outer(np.arange(positions), 1e4 ** (-np.arange(0, size, 2) / size))
    made.constant("cos", np.cos(angles).astype(np.float16))
    made.constant("sin", np.sin(angles).astype(np.float16))


def _layer(
    made: Maker, at: str, data: str, hidden: int, size: int, shared: int, positions: int
) -> str:
    normed = made.norm(data, f"{at}.n1")
    heads = {}
    for part, rows in (("q", hidden), ("k", shared * size), ("v", shared * size)):
        flat = made.product(normed, f"{at}.{part}", rows, hidden)
        split = made.node("Reshape", [flat, "split.q" if part == "q" else "split.k"], f"{flat}.s")
        heads[part] = made.node("Transpose", [split], f"{flat}.h", perm=[0, 2, 1, 3])
    for part in "qk":
        turned = [heads[part], "cos", "sin", "places"]
        heads[part] = made.node("RotaryEmbedding", turned, f"{at}.{part}.placed")
    for part, kind in (("k", "key"), ("v", "value")):
        shape = [1, shared, positions, size]
        made.ins.append((f"{kind}.{at}", TensorProto.FLOAT16, shape))
        made.outs.append((f"present_{kind}.{at}", TensorProto.FLOAT16, shape))
        written = [f"{kind}.{at}", heads[part], "start"]
        made.node("TensorScatter", written, f"present_{kind}.{at}", axis=-2, mode="linear")
    seen = [heads["q"], f"present_key.{at}", f"present_value.{at}", "mask"]
    mixed = made.node("Attention", seen, f"{at}.attention", TRT_decomposable=1)
    mixed = made.node("Transpose", [mixed], f"{at}.back", perm=[0, 2, 1, 3])
    mixed = made.node("Reshape", [mixed, "joined"], f"{at}.joined")
    data = made.node("Add", [data, made.product(mixed, f"{at}.o", hidden, hidden)], f"{at}.x1")
    normed = made.norm(data, f"{at}.n2")
    gate = made.product(normed, f"{at}.gate", 2 * hidden, hidden)
    up = made.product(normed, f"{at}.up", 2 * hidden, hidden)
    gate = made.node("Mul", [gate, made.node("Sigmoid", [gate], f"{at}.open")], f"{at}.silu")
    inner = made.node("Mul", [gate, up], f"{at}.inner")
    return made.node("Add", [data, made.product(inner, f"{at}.d", hidden, 2 * hidden)], f"{at}.x2")


def save(model: onnx.ModelProto, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(
        model,
        folder / "lowered.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location="lowered.data",
        size_threshold=1024,
    )
    return folder / "lowered.onnx"


def test_the_decoder_is_a_valid_graph() -> None:
    model = decoder(layers=1, hidden=64)
    for node in model.graph.node:
        # The one thing that is TensorRT's own.
        for attribute in [a for a in node.attribute if a.name == "TRT_decomposable"]:
            node.attribute.remove(attribute)
    onnx.checker.check_model(model, full_check=True)
