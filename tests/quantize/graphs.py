"""A small portable graph that is made without torch: a table, layers, a last projection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specrt.bundle import Geometry
from specrt_export.portable.graph import ATTACHED, GEOMETRY

VOCAB, WIDTH = 256, 64


def geometry(vocab: int = VOCAB) -> Geometry:
    return Geometry(
        layers=1, heads=1, kv_heads=1, head_dim=8, vocab_size=vocab, max_positions=64, windows=(0,)
    )  # fmt: skip


def write(folder: Path, weights: Mapping[str, NDArray[Any]], *, shards: int = 1) -> Path:
    """Write weights into shards, and a graph that multiplies with all of them, last of all `head`.

    `table` is looked up in, a vector is added, and where there is no `head` the table is used
    again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = [_store(folder, f"shard-{n % shards}.safetensors", name, weights[name])
               for n, name in enumerate(weights)]  # fmt: skip
    nodes: list[onnx.NodeProto] = []
    x = _add(nodes, "Gather", ["table", "input_ids"])
    for name in [n for n in weights if n not in ("table", "head")]:
        x = _apply(nodes, x, name, weights[name])
    turned = _add(nodes, "Transpose", ["head" if "head" in weights else "table"], perm=[1, 0])
    nodes.append(helper.make_node("MatMul", [x, turned], ["logits"], "head/MatMul"))
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", "V"])]
    graph = helper.make_graph(nodes, "toy", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    facts = {ATTACHED: "true", GEOMETRY: json.dumps(geometry(len(weights["table"])).to_json())}
    helper.set_model_props(model, facts)
    path = folder / "toy.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _store(folder: Path, shard: str, name: str, array: NDArray[Any]) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    with (folder / shard).open("ab") as file:
        place = {"location": shard, "offset": file.tell(), "length": array.nbytes}
        file.write(array.tobytes())
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _apply(nodes: list[onnx.NodeProto], x: str, name: str, array: NDArray[Any]) -> str:
    if array.ndim == 1:
        return _add(nodes, "Add", [x, name])
    return _add(nodes, "MatMul", [x, _add(nodes, "Transpose", [name], perm=[1, 0])])


def _add(nodes: list[onnx.NodeProto], op_type: str, inputs: list[str], **attributes: Any) -> str:
    name = f"{inputs[-1]}/{op_type}"
    nodes.append(helper.make_node(op_type, inputs, [name], name, **attributes))
    return name


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
