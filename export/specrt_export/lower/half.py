"""Computes in half precision, and keeps every value of a pass on the device."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from specrt.errors import BuildError
from specrt.geometry import CONV
from specrt_export.lower.lazy_tensor import (
    ENGINE,
    LazyTensor,
    as_float,
    stored_weights,
    write_engine,
)
from specrt_export.lower.shapes import value_types
from specrt_export.lower.view import GraphView
from specrt_export.portable.external_data import narrow

_FLOAT, _FP16, _BF16 = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)

TYPES = {"fp16": _FP16, "bf16": _BF16}
"""What a graph can be halved to."""

_HALF = frozenset((
    "Add", "Attention", "Concat", "DequantizeLinear", "Div", "Expand", "FusedMatMul", "Gather",
    "GatherBlockQuantized", "Gelu", "GroupQueryAttention", "Identity", "LayerNormalization",
    "MatMul", "MatMulNBits", "Mul", "Neg", "Relu", "Reshape", "RMSNormalization",
    "RotaryEmbedding", "ScatterElements", "Sigmoid", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Slice", "Split", "Squeeze",
    "Sub", "Tanh", "TensorScatter", "Tile", "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
"""Operators whose kernels take half precision and sum, where they sum, in fp32. What is not named
here (powers, means, exponentials) is computed in fp32 between two casts."""

STATES = ("feature", "hidden", "state")
"""Outputs that a target leaves for a head, an encoder for a decoder, and a head for its next pass;
heads and cross projections read `hidden`."""

_KEPT = ("key", "value", CONV, "cross_key", "cross_value")
"""Inputs and outputs of the half type, as they are called before the number of a layer."""

_LOGITS = "logits"

_PROJECTIONS = ("FusedMatMul", "MatMul", "MatMulNBits")


def halve(view: GraphView, kind: str, exact: Collection[str] = ()) -> None:
    """Compute in half precision up to the projection of logits, and in fp32 from there.

    ```
    x ─┬ op ─ y          =>      x/half ─┬ op ─ y/half
    w ─┘                         w/half ─┘

    x ─ Projection ─ (softcap ─) logits ─ TopK ─ argmax
      =>  x/half ─ Projection ─ Cast fp32 ─ (softcap ─) logits ─ TopK ─ argmax
    ```
    KV inputs and outputs are of the half type, and so are cross keys and values; logits, argmax and
    confidence stay what they were.
    So does what a target and its head hand over: one may compute in another type than the other.
    `exact` are values that are computed in fp32 all the same; so are angles, up to their cosines
    and sines: fp16 holds whole positions up to 2048, bf16 up to 256.
    """
    if _LOGITS in view.outputs:
        _widen_scores(view)
    _widen_states(view, exact)
    _Halving(view, TYPES[kind], exact).run()


def _widen_scores(view: GraphView) -> None:
    """Put a cast to fp32 after the last projection, a cast from fp32 until all is halved."""
    head = _head(view)
    output = view.add(head.op_type, head.input, domain=head.domain, **view.attributes(head))
    view.add("Cast", [output], outputs=[head.output[0]], to=_FLOAT)
    view.tidy()


def _widen_states(view: GraphView, exact: Collection[str]) -> None:
    """Put a cast to fp32 after what is computed for each position, where it is an output."""
    for name in sorted(view.outputs & set(STATES) - set(exact)):
        view.add("Cast", [view.rename(name)], outputs=[name], to=_FLOAT)
    view.tidy()


def _head(view: GraphView) -> onnx.NodeProto:
    """Return the projection that logits come from; a bias counts as part of what follows it."""
    node = view.maker(_LOGITS)
    while node is not None and node.op_type not in _PROJECTIONS:
        node = next((m for i in node.input if (m := view.maker(i)) is not None), None)
    assert node is not None, "logits are made by a projection"
    return node


class _Halving:
    """Rewrites one graph: every float value is given in the type that its reader wants."""

    def __init__(self, view: GraphView, to: int, exact: Collection[str]) -> None:
        self.view = view
        self.to = to
        types = value_types(view)
        self.floats = {name for name, onnx_type in types.items() if onnx_type == _FLOAT}
        self.exact = _angles(view).union(exact)
        if _LOGITS in view.outputs:
            self.exact |= _read_from(view, _head(view).output[0])
        self.constants = {t.name for t in view.graph.initializer}
        self.types: dict[str, int] = {}
        self.cast: dict[tuple[str, int], str] = {}

    def run(self) -> None:
        """Halve what can be."""
        for value in [*self.view.graph.input, *self.view.graph.output]:
            if value.name.removeprefix("present_").partition(".")[0] in _KEPT:
                value.type.tensor_type.elem_type = self.to
                self.types[value.name] = self.to
        nodes = self.view.nodes()
        for node in nodes:
            self.types |= dict.fromkeys(self.floats.intersection(node.output), self._wanted(node))
        for node in nodes:
            self._retype(node)
        self.view.tidy()

    def _wanted(self, node: onnx.NodeProto) -> int:
        is_half = node.op_type in _HALF and node.output[0] not in self.exact
        return self.to if is_half else _FLOAT

    def _retype(self, node: onnx.NodeProto) -> None:
        if node.op_type == "Cast":  # takes what it is given
            return
        wanted = self._wanted(node)
        for index, name in enumerate(node.input):
            if name in self.floats:
                node.input[index] = self._as(name, wanted)
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0  # a choice among CPU kernels

    def _as(self, name: str, wanted: int) -> str:
        """Return a float value in a type, adding a cast or a narrowed weight once."""
        if name in self.constants:
            return name if wanted == _FLOAT else self._narrowed(name)
        if self.types.get(name, _FLOAT) == wanted:
            return name
        if (name, wanted) not in self.cast:
            self.cast[name, wanted] = self.view.add("Cast", [name], to=wanted)
        return self.cast[name, wanted]

    def _narrowed(self, name: str) -> str:
        array = self.view.constant(name)
        stored = self.view.stored(name) if array is None else _in_graph(name, array)
        assert stored is not None, "an initializer lies in the graph or next to it"
        return self.view.add_stored(narrowed(stored, self.to))


def _read_from(view: GraphView, name: str) -> set[str]:
    """Return the values computed from one."""
    reached, stack = set[str](), [name]
    while stack:
        for reader in view.readers(stack.pop()):
            new = set(filter(None, reader.output)) - reached
            reached |= new
            stack.extend(new)
    return reached


def _angles(view: GraphView) -> set[str]:
    """Return what cosines and sines are computed from."""
    sources, stack = set[str](), [node.input[0] for node in view.nodes("Cos", "Sin")]
    while stack:
        name = stack.pop()
        node = view.maker(name)
        if node is not None and name not in sources:
            sources.add(name)
            stack.extend(node.input)
    return sources


def _in_graph(name: str, array: NDArray[Any]) -> LazyTensor:
    def rows(begin: int, end: int) -> NDArray[Any]:
        return array[begin:end] if array.ndim else array

    return LazyTensor(name, _FLOAT, array.shape, rows)


def narrowed(source: LazyTensor, to: int) -> LazyTensor:
    """Return an fp32 tensor as fp16 or bf16, rounded to nearest.

    Raises: BuildError, when it is written, for a weight that fp16 cannot hold.
    """

    def rows(begin: int, end: int) -> NDArray[Any]:
        part = np.asarray(source.rows(begin, end), np.float32)
        return narrow(part, "bf16") if to == _BF16 else _to_fp16(source.name, part)

    bytes_of = f"{source.bytes_of}/half" if source.bytes_of else ""
    return LazyTensor(f"{source.name}/half", to, source.shape, rows, bytes_of)


def _to_fp16(name: str, part: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = part.astype(np.float16)
    if not np.array_equal(np.isfinite(half), np.isfinite(part)):
        raise BuildError(
            f"{name} has weights up to {float(np.abs(part).max()):.3g}, and fp16 ends at 65504; "
            "build with precision bf16"
        )
    return half


LENGTHS, STEPS = "lengths", "steps"
"""Inputs of an engine that stays on its device: `lengths` [B] int32, the index of each row's last
key after the pass, and `steps` [S] int64, 0 to S - 1, only where the graph counts positions."""

_FIRST_LENGTH, _TOTAL_LENGTH = 5, 6

_HOST_OPERATORS = frozenset(("NonZero", "Range", "Shape", "Size"))


def keep_on_device(view: GraphView, max_length: int) -> None:
    """Take lengths and positions from inputs instead of from the sizes of other inputs.

    ```
    start, (input_ids ─ Shape) ─ Add ─ Cast ─┬─ Sub 1 ─┐
                                             └──────── GroupQueryAttention
    0, (input_ids ─ Shape ─ Squeeze), 1 ─ Range ─ positions

      =>  lengths, max_length ─ GroupQueryAttention          steps ─ positions
    ```
    `GroupQueryAttention` reads its total length on the host, so that a captured pass would keep
    the one it was captured with. It only sizes buffers and grids with it; what is attended to
    comes from `lengths`, on the device. So the total is `max_length`, in every pass.
    Raises: BuildError when something of the graph would still be computed on the host.
    """
    total = view.add_constant("total", np.array([max_length], np.int32))
    for node in view.nodes("GroupQueryAttention"):
        node.input[_FIRST_LENGTH] = LENGTHS
        node.input[_TOTAL_LENGTH] = total
    _count_from_input(view)
    _pick_confidence(view)
    view.tidy()
    _replace_inputs(view)
    left = sorted({n.op_type for n in view.nodes() if n.op_type in _HOST_OPERATORS})
    if left:
        raise BuildError(
            f"the lowered graph computes {', '.join(left)} on the host, and ort-cuda engines stay "
            "on their device. This is a defect of the lowering: please report the architecture, "
            "and build for ort-cpu"
        )


def _count_from_input(view: GraphView) -> None:
    for node in view.nodes("Range"):
        begin, step = view.scalar(node.input[0]), view.scalar(node.input[2])
        counts = begin == 0 and step == 1 and _is_width(view, node.input[1])
        if counts:
            view.replace(node.output[0], STEPS)


def _pick_confidence(view: GraphView) -> None:
    """Pick the largest share by its place, which is known: the reduction would need cuDNN.

    ```
    logits ─┬─ Softmax ─ ReduceMax ─ y
            └─ TopK 1 ─ place

      =>  logits ─┬─ Softmax ──────── GatherElements ─ Squeeze ─ y
                  └─ TopK 1 ─ place ──┘
    ```
    """
    for node in view.nodes("ReduceMax"):
        shares = view.maker(node.input[0], "Softmax")
        readers = view.readers(shares.input[0]) if shares is not None else []
        top = next((reader for reader in readers if reader.op_type == "TopK"), None)
        if top is None or view.scalar(top.input[1]) != 1:
            continue
        largest = view.add("GatherElements", [node.input[0], top.output[1]], axis=-1)
        view.add("Squeeze", [largest, node.input[1]], outputs=[node.output[0]])


def _is_width(view: GraphView, name: str) -> bool:
    """Tell whether a number is the width of `input_ids`."""
    node = view.maker(name)
    while node is not None and node.op_type in ("Squeeze", "Cast", "Gather", "Reshape"):
        if node.op_type == "Gather" and view.scalar(node.input[1]) != 1:
            return False
        node = view.maker(node.input[0])
    return node is not None and node.op_type == "Shape" and node.input[0] == "input_ids"


def _replace_inputs(view: GraphView) -> None:
    """Declare the new inputs, and drop those that nothing reads any more."""
    read = {name for node in view.nodes() for name in node.input}
    ids = next(i for i in view.graph.input if i.name == "input_ids")
    batch, width = (d.dim_value or d.dim_param for d in ids.type.tensor_type.shape.dim)
    added = [
        helper.make_tensor_value_info(LENGTHS, onnx.TensorProto.INT32, [batch]),
        helper.make_tensor_value_info(STEPS, onnx.TensorProto.INT64, [width]),
    ]
    inputs = [i for i in (*view.graph.input, *added) if i.name in read]
    del view.graph.input[:]
    view.graph.input.extend(inputs)


def widened_folder(engine: Path, scratch: Path) -> Path:
    """Return the folder of lowered graphs, or one with copies in fp32: bf16 has no CPU kernels."""
    if compute_type_of(engine) != "bf16":
        return engine
    for path in sorted(engine.glob("*.onnx")):
        model = onnx.load(path, load_external_data=False)
        widened = {
            name: as_float(weight) if weight.onnx_type == _BF16 else weight
            for name, weight in stored_weights(model, engine).items()
        }
        write_engine(_widened(model, widened), widened, scratch, path.stem)
    return scratch


def compute_type_of(engine: Path) -> str:
    """Return what the engine of a folder computes in: the type of its KV buffers."""
    model = onnx.load(engine / ENGINE, load_external_data=False)
    kinds = {i.type.tensor_type.elem_type for i in model.graph.input if i.name.startswith("key.")}
    return {_BF16: "bf16", _FLOAT: "fp32"}.get(kinds.pop(), "fp16")


def _widened(model: onnx.ModelProto, weights: dict[str, LazyTensor]) -> onnx.ModelProto:
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == _BF16:
            value.type.tensor_type.elem_type = _FLOAT
    for tensor in model.graph.initializer:
        if tensor.data_type == _BF16 and tensor.name not in weights:
            upper = np.frombuffer(tensor.raw_data, np.uint16).astype(np.uint32)
            tensor.raw_data = (upper << 16).tobytes()
        if tensor.data_type == _BF16:
            tensor.data_type = _FLOAT
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == _BF16:
                attribute.i = _FLOAT
    return model
