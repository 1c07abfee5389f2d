"""A small portable graph that is made without torch: a table, layers, a last projection."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specrt.geometry import Geometry
from specrt_export.checkpoint.codes import FP4_VALUES, Codes, TensorOrigin
from specrt_export.portable.external_data import DataFile, Floats, StoredTensor, external_tensors
from specrt_export.portable.graph import ATTACHED, GEOMETRY, open_session, read_graph
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import WEIGHTS, graft, keep_rest, prune
from specrt_export.quantize.weight_choice import choose
from specrt_export.quantize.weight_store import Store

VOCAB, WIDTH = 256, 64


def geometry(vocab: int = VOCAB) -> Geometry:
    return Geometry.uniform(
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
    facts = {ATTACHED: "true", GEOMETRY: json.dumps(asdict(geometry(len(weights["table"]))))}
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


FORMATS = ("int4", "int4-zeros", "int4-minimums", "int4-unsigned", "int8", "int8-zeros",
           "int8-minimums", "int8-unsigned", "fp4", "fp8")  # fmt: skip
"""Kinds of codes; with zeros and minimums they are unsigned, as files have them."""


def random_codes(kind: str, rows: int, inner: int, block: int, seed: int = 0) -> Codes:
    """Return codes of a kind, of which every one occurs, with scales that fp16 holds."""
    rng = np.random.default_rng(seed)
    name, _, beside = kind.partition("-")
    shape, blocks = (rows, inner), (rows, inner // block)
    scales = rng.uniform(-0.3, 0.3, blocks).astype(np.float16).astype(np.float32)
    most = 16 if name in ("int4", "fp4") else 256
    codes = rng.integers(0, most, shape).astype(np.uint8)
    if name == "fp8":  # without the two that are not numbers
        codes = np.where(codes & 127 == 127, np.uint8(0), codes)
    if beside == "zeros":
        return Codes(name, codes, scales, zeros=rng.integers(0, most, blocks).astype(np.uint8))
    if beside == "minimums":
        return Codes(name, codes, scales, minimums=-scales[::-1] * np.float32(2))
    if beside or name in ("fp4", "fp8"):
        return Codes(name, codes, scales)
    return Codes(name, (codes.astype(np.int16) - most // 2).astype(np.int8), scales)


def rounded(weights: Floats, kind: str, block: int) -> Codes:
    """Return weights [N, K] rounded to codes of a kind, with scales that fp16 holds."""
    name, _, beside = kind.partition("-")
    blocks = weights.reshape(len(weights), -1, block)
    low, high = blocks.min(-1), blocks.max(-1)
    most = 15 if name == "int4" else 255
    reach = {"fp4": 6, "fp8": 448}.get(name, most // 2)
    width = (high - low) / most if beside else np.maximum(high, -low) / reach
    scales = (np.maximum(width, 1e-6) * 1.01).astype(np.float16).astype(np.float32)
    exact = blocks / scales[..., None]
    if name == "fp8":
        codes = exact.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    elif name == "fp4":
        codes = np.abs(exact[..., None] - FP4_VALUES).argmin(-1)
    zeros = np.rint(-low / scales) if beside == "zeros" else None
    minimums = (-low).astype(np.float16).astype(np.float32) if beside == "minimums" else None
    if name in ("int4", "int8"):
        begin = 0 if zeros is None else zeros
        begin = begin if minimums is None else minimums / scales
        least = 0 if beside else -(most // 2)
        codes = np.clip(
            np.rint(exact + np.reshape(begin, (*np.shape(begin), 1))), least, most + least
        )
    codes = codes.astype(np.uint8 if beside or name[:2] == "fp" else np.int8).reshape(weights.shape)
    zeros = zeros if zeros is None else zeros.clip(0, most).astype(np.uint8)
    return Codes(name, codes, scales, zeros, minimums)


def in_codes(graph: Path, checkpoint: Path, folder: Path, kind: str, block: int) -> Path:
    """Write a portable graph whose matrices are those of a checkpoint, rounded to a kind."""
    model = read_graph(graph)
    folder.mkdir(parents=True)
    tensors = {tensor.name: tensor for tensor in external_tensors(model)}
    with closing(DataFile(folder / WEIGHTS, WEIGHTS)) as file, closing(Store(file)) as store:
        done = []
        for choice in choose(model, Precision.of("int8", block=block)):
            stored = StoredTensor(tensors[choice.weight], checkpoint)
            weights = stored.read(0, stored.rows)
            held = HeldCodes(choice.weight, rounded(weights, kind, block))
            done.append(store.write_codes(replace(choice, precision=held.precision), held))
        graft(model, done)
        keep_rest(model, checkpoint, store)
    (folder / "graph.onnx").write_bytes(model.SerializeToString())
    return folder / "graph.onnx"


@dataclass(frozen=True)
class HeldCodes:
    """Codes in memory; a `CodedWeight`."""

    name: str
    whole: Codes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.codes.shape

    @property
    def precision(self) -> str:
        return self.whole.format

    @property
    def block(self) -> int:
        return self.shape[1] // self.whole.scales.shape[1]

    @property
    def inputs(self) -> None:
        return None

    @property
    def origin(self) -> TensorOrigin:
        return TensorOrigin(Path("held"), self.name, self.precision)

    def codes(self, begin: int, end: int) -> Codes:
        one = self.whole
        return Codes(
            one.format, one.codes[begin:end], one.scales[begin:end],
            None if one.zeros is None else one.zeros[begin:end],
            None if one.minimums is None else one.minimums[begin:end],
        )  # fmt: skip

    def floats(self, begin: int, end: int) -> Floats:
        return self.codes(begin, end).floats()


def values_of(model: onnx.ModelProto, folder: Path, names: Iterable[str]) -> list[Any]:
    """Return values of a graph that no input decides, as plain ONNX Runtime makes them."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.input[:], copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    prune(copy)
    return list(open_session(copy, folder)[0].run(None, {}))
