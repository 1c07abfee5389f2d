"""Evaluates a part of a graph while it is lowered: what it computes of known inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from specrt.engine.ort.ort_engine import silent_options
from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.lower.view import GraphView, stamp_oldest_opset


def evaluate(
    view: GraphView, names: Sequence[str], feeds: Mapping[str, NDArray[Any]]
) -> list[NDArray[Any]]:
    """Return some values of a graph as they are of its inputs; those that none needs may be fed.

    Weights that the values are made of are read whole.
    """
    part = onnx.ModelProto()
    part.CopyFrom(view.model)
    del part.graph.output[:]
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    part = GraphView(part).tidy()
    stamp_oldest_opset(part)
    needed = {i for n in part.graph.node for i in n.input}
    inputs = [i for i in part.graph.input if i.name in needed]
    del part.graph.input[:]
    part.graph.input.extend(inputs)
    for value in part.graph.input:
        _free_shape(value)
    _take_in(part, view.weights())
    options = silent_options()
    session = ort.InferenceSession(part.SerializeToString(), options, ["CPUExecutionProvider"])
    found: list[NDArray[Any]] = session.run(None, {i.name: feeds[i.name] for i in inputs})
    return found


def _take_in(model: onnx.ModelProto, weights: Mapping[str, LazyTensor]) -> None:
    """Put the weights of a graph into it."""
    for tensor in model.graph.initializer:
        weight = weights.get(tensor.name)
        if weight is not None:
            tensor.raw_data = weight.load().tobytes()
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT


def _free_shape(value: onnx.ValueInfoProto) -> None:
    """Take a fixed batch away: one row is enough for a table."""
    for axis, dim in enumerate(value.type.tensor_type.shape.dim):
        dim.Clear()
        dim.dim_param = f"{value.name}_{axis}"
