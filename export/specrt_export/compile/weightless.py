"""Let ONNX Runtime optimise a graph without loading what it weighs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import helper

from specrt.errors import BuildError
from specrt_export.compile.room import no_room
from specrt_export.lower.stored import Stored

_OPTIMISED = "optimised.onnx"


def optimise(
    model: onnx.ModelProto, weights: Mapping[str, Stored], folder: Path
) -> onnx.ModelProto:
    """Return a graph as ONNX Runtime optimises it; weights are inputs meanwhile.

    What a fusion of its own would have to know of a weight, a rewrite of ours has done before.
    Raises: BuildError when the library refuses the graph.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    placeholders = [t for t in model.graph.initializer if t.name in weights]
    kept = [t for t in model.graph.initializer if t.name not in weights]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    bare.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in placeholders
    )
    optimised = onnx.load(_optimise(bare, folder))
    (folder / _OPTIMISED).unlink()
    return _restored(optimised, {t.name: t for t in placeholders})


def _optimise(model: onnx.ModelProto, folder: Path) -> Path:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / _OPTIMISED)
    try:
        ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:  # the library raises its own pybind types
        reason = str(error).splitlines()[0]
        if "serialization failed" in reason:  # said of a full disk
            raise no_room(folder / _OPTIMISED) from error
        raise BuildError(f"ONNX Runtime {ort.__version__} could not compile: {reason}") from error
    return folder / _OPTIMISED


def _restored(
    model: onnx.ModelProto, placeholders: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    inputs = [i for i in model.graph.input if i.name not in placeholders]
    read = {name for node in model.graph.node for name in node.input}
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(t for name, t in placeholders.items() if name in read)
    return model
