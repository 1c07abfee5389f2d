"""Compiles a portable graph for ONNX Runtime on a CPU: lower, optimise, write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specrt.bundle import Geometry
from specrt.errors import BuildError
from specrt_export.compile.engine_file import ENGINE, WEIGHTS, disk_full, write_engine
from specrt_export.lower.lazy_tensor import LazyTensor, stored_weights
from specrt_export.lower.ort_lowering import OrtTarget, lower
from specrt_export.portable.graph import (
    MODEL_TYPE,
    check_length,
    external_tensors,
    facts_of,
    geometry_of,
    read_graph,
)
from specrt_export.quantize.codes import narrow, widen
from specrt_export.quantize.precision import Precision
from specrt_export.quantize.store import DataFile

_OPTIMISED = "optimised.onnx"


def optimise(
    model: onnx.ModelProto, weights: Mapping[str, LazyTensor], folder: Path
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
            raise disk_full(folder / _OPTIMISED) from error
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


_TYPES = {"bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16}

SLICE = 1 << 22
"""Weights in memory at a time."""


def store_half(folder: Path, precision: Precision) -> int:
    """Halve the weights of an engine that a precision keeps as fp16 or bf16; return how many.

        w (fp32) ── Op      =>      w (bf16) ── Cast ── Op

    The CPU computes in fp32. Quantizing rounded these weights already, so a weight that comes back
    from the smaller type bit for bit is stored in it, and folding the cast when the engine is
    opened gives the same engine. What does not, such as a table of angles, stays fp32.
    """
    kinds = [kind for kind in _TYPES if kind in precision.names]
    if not kinds:
        return 0
    model = onnx.load(folder / ENGINE, load_external_data=False)
    written = folder / f"{WEIGHTS}.new"
    places: dict[tuple[str, ...], onnx.TensorProto] = {}
    with closing(DataFile(written, WEIGHTS)) as file:
        for tensor in external_tensors(model):
            place = tuple(entry.value for entry in tensor.external_data)
            if place not in places:  # a table may be there in two shapes
                places[place] = _move(tensor, folder / WEIGHTS, kinds, file)
            moved = places[place]
            tensor.data_type = moved.data_type
            del tensor.external_data[:]
            tensor.external_data.extend(moved.external_data)
    count = _add_casts(model)
    (folder / ENGINE).write_bytes(model.SerializeToString(deterministic=True))
    written.replace(folder / WEIGHTS)
    return count


def _move(
    tensor: onnx.TensorProto, path: Path, kinds: Sequence[str], file: DataFile
) -> onnx.TensorProto:
    """Copy a tensor's bytes, in the first of some smaller types that holds them."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = int(place["offset"]), int(place["length"])
    if tensor.data_type != TensorProto.FLOAT:
        region = file.reserve(tensor.name, tensor.data_type, (length, 1), 1)
        for begin, part in _parts(path, offset, length, np.uint8):
            region.write(begin, part)
        return region.tensor
    items = length // 4
    fits = [k for k in kinds if all(_holds(k, p) for _, p in _parts(path, offset, items))]
    kind = fits[0] if fits else ""
    region = file.reserve(
        tensor.name, _TYPES.get(kind, TensorProto.FLOAT), (items, 1), 2 if kind else 4
    )
    for begin, part in _parts(path, offset, items):
        region.write(begin, narrow(part, kind) if kind else part)
    return region.tensor


def _parts(
    path: Path, offset: int, items: int, dtype: type[Any] = np.float32
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the index and the items of one slice after another."""
    size = np.dtype(dtype).itemsize
    for begin in range(0, items, SLICE):
        count = min(SLICE, items - begin)
        yield begin, np.fromfile(path, dtype, count, offset=offset + begin * size)


def _holds(kind: str, part: NDArray[np.float32]) -> bool:
    same = widen(narrow(part, kind), _TYPES[kind]).view(np.uint32) == part.view(np.uint32)
    return bool(same.all())


def _add_casts(model: onnx.ModelProto) -> int:
    """Widen what is stored as fp16 or bf16 before anything reads it; return how many that is."""
    small = [t.name for t in external_tensors(model) if t.data_type in _TYPES.values()]
    casts = [
        helper.make_node("Cast", [name], [f"{name}/Cast"], f"{name}/Cast", to=TensorProto.FLOAT)
        for name in small
    ]
    renamed = {cast.input[0]: cast.output[0] for cast in casts}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*casts, *nodes])
    return len(casts)


BATCH = 1
"""Rows of an engine, unless more are asked for."""


@dataclass(frozen=True)
class CompiledModel:
    """A saved engine, and what is known about it."""

    geometry: Geometry
    model_type: str
    parameters: int
    weight_bytes: int
    fused: dict[str, str]
    """Per rewrite, how many places it took of how many there are, as `"8/8"`."""


def compile_ort_cpu(
    graph: Path,
    checkpoint: Path,
    out: Path,
    max_length: int,
    *,
    batch: int = BATCH,
    accuracy_level: int = 4,
    confidence: bool = False,
) -> CompiledModel:
    """Write `engine.onnx` and `engine.data` for a portable graph into a folder.

    Weights are read, changed and written a slice at a time, never all at once.
    Raises: BuildError, CheckpointError, ExportError for what is no portable graph.
    """
    portable = read_graph(graph)
    geometry = geometry_of(portable)
    check_length(geometry, max_length, checkpoint)
    weights = stored_weights(portable, checkpoint)
    target = OrtTarget(geometry, max_length, batch, accuracy_level, confidence)
    lowered = lower(portable, weights, target)
    out.mkdir(parents=True, exist_ok=True)
    write_engine(optimise(lowered.model, lowered.weights, out), lowered.weights, out)
    return CompiledModel(
        geometry=geometry,
        model_type=facts_of(portable).get(MODEL_TYPE, "unknown"),
        parameters=sum(w.items for w in weights.values()),
        weight_bytes=(out / WEIGHTS).stat().st_size,
        fused=lowered.fused,
    )
