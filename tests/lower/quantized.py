"""Portable graphs with quantized weights, and what they stand for in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from specrt_export.lower.lazy_tensor import as_float, stored_weights
from specrt_export.portable.external_data import external_tensors
from specrt_export.portable.graph import read_graph

INT4, INT8 = onnx.TensorProto.INT4, onnx.TensorProto.INT8


def quantize(
    graph: Path,
    checkpoint: Path,
    folder: Path,
    bits: Callable[[str], int],
    block: Callable[[str], int] = lambda name: 16,
) -> tuple[Path, Path]:
    """Write a graph with every matrix in blocks of `bits(name)`, and one with the same in fp32.

    Matrices of 32 bits stay as they are. Both graphs have their weights in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = read_graph(graph)
    exact = onnx.ModelProto()
    exact.CopyFrom(model)
    weights = {n: as_float(w).load() for n, w in stored_weights(model, checkpoint).items()}
    with (
        (folder / "quantized.data").open("wb") as codes,
        (folder / "exact.data").open("wb") as file,
    ):
        for tensor, copy in zip(external_tensors(model), external_tensors(exact), strict=True):
            array, width = weights[tensor.name], bits(tensor.name)
            if array.ndim == 2 and width < 32:
                array = _quantize(model.graph, tensor, array, width, block(tensor.name), codes)
            else:
                place(tensor, array, onnx.TensorProto.FLOAT, codes)
            place(copy, array, onnx.TensorProto.FLOAT, file)
    for one, name in ((model, "quantized"), (exact, "exact")):
        _drop_casts(one.graph)
        (folder / f"{name}.onnx").write_bytes(one.SerializeToString())
    return folder / "quantized.onnx", folder / "exact.onnx"


def _quantize(
    graph: onnx.GraphProto,
    tensor: onnx.TensorProto,
    array: NDArray[np.float32],
    bits: int,
    block: int,
    file: BinaryIO,
) -> NDArray[np.float32]:
    """Put codes and scales in the place of a matrix; return what they stand for.

    A matrix [K, N] that a Gemm reads is turned first.
    """
    name = tensor.name
    turned = any(
        n.op_type == "Gemm" and not any(a.name == "transB" and a.i for a in n.attribute)
        for n in graph.node
        if name in n.input
    )
    matrix = np.ascontiguousarray(array.T) if turned else array
    rows, inner = matrix.shape
    parts = matrix.reshape(rows, inner // block, block)
    top = 2 ** (bits - 1) - 1
    scales = np.abs(parts).max(axis=-1) / top
    scales[scales == 0] = 1
    whole = np.rint(parts / scales[..., None]).astype(np.int8).reshape(rows, inner)
    stored = pack(whole) if bits == 4 else whole
    scale = onnx.TensorProto(name=f"{name}.scale", dims=scales.shape)
    tensor.name = f"{name}.codes"
    del tensor.dims[:]
    tensor.dims.extend(whole.shape)
    place(tensor, stored, INT4 if bits == 4 else INT8, file)
    place(scale, scales.astype(np.float32), onnx.TensorProto.FLOAT, file)
    graph.initializer.append(scale)
    made = f"{name}.turned" if turned else name
    inputs = [tensor.name, scale.name]
    nodes = [helper.make_node("DequantizeLinear", inputs, [made], axis=1, block_size=block)]
    if turned:
        nodes.append(helper.make_node("Transpose", [made], [name], perm=[1, 0]))
    for node in reversed(nodes):
        graph.node.insert(0, node)
    exact = (whole.reshape(parts.shape) * scales[..., None].astype(np.float32)).reshape(rows, inner)
    back = exact.astype(np.float32)
    return np.ascontiguousarray(back.T) if turned else back


def pack(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return int4 codes [N, K] as bytes [N, K / 2], the first of two in the low half."""
    low, high = codes[:, ::2] & 15, codes[:, 1::2] & 15
    return (low | high << 4).astype(np.uint8)


def place(tensor: onnx.TensorProto, array: NDArray[Any], onnx_type: int, file: BinaryIO) -> None:
    """Append an array to a file, and point a tensor there."""
    offset = file.tell()
    file.write(np.ascontiguousarray(array).tobytes())
    tensor.data_type = onnx_type
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    entries = {"location": Path(file.name).name, "offset": offset, "length": array.nbytes}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))


def _drop_casts(graph: onnx.GraphProto) -> None:
    """Drop the casts that followed weights of other types: they are fp32 now."""
    known = {t.name for t in graph.initializer} | {
        n.output[0] for n in graph.node if n.op_type in ("DequantizeLinear", "Transpose")
    }
    casts = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Cast"}
    dropped = {made: read for made, read in casts.items() if read in known}
    nodes = [n for n in graph.node if n.output[0] not in dropped]
    for node in nodes:
        for index, name in enumerate(node.input):
            node.input[index] = dropped.get(name, name)
    del graph.node[:]
    graph.node.extend(nodes)
