"""Lowers a portable graph to the operators of the CPU kernels; see `runtime/cpp/src/kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from specrt.engine.ort.ort_engine import packed_shape
from specrt.errors import BuildError
from specrt.geometry import BASE
from specrt_export.heads.dflash_format import CONTEXT
from specrt_export.heads.eagle3_format import HIDDEN
from specrt_export.lower.attention import Layer, Rotary, sees_ahead, tabulate
from specrt_export.lower.canonical import sink_transposes
from specrt_export.lower.convolution import fuse_convolutions
from specrt_export.lower.cross_attention import (
    CROSS_ATTENTION,
    LENGTHS,
    SLOTS,
    cross_shape,
    fuse_cross_attention,
)
from specrt_export.lower.distance_bias import bias_by_distance
from specrt_export.lower.experts import lower_experts
from specrt_export.lower.lazy_tensor import LazyTensor, in_memory
from specrt_export.lower.logits import CONFIDENCE, add_scores
from specrt_export.lower.norm import SKIP
from specrt_export.lower.ort_lowering import (
    OrtTarget,
    attend,
    canonical_view,
    finish,
    fuse_the_rest,
)
from specrt_export.lower.projections import (
    MICROSOFT,
    PROJECTION,
    SPECRT,
    add_projection,
    find_matrix,
    find_projection,
    gated,
    of_matrices,
    read_projection,
)
from specrt_export.lower.recurrence import lower_recurrences
from specrt_export.lower.shapes import Shapes
from specrt_export.lower.tiles import add_tiles, alternating, has_codes, whole_tiles
from specrt_export.lower.view import Counts, GraphView, Lowered

POSITIONS = "positions"
"""Input [T]: where each token stands in its row of the KV buffers, which `SLOTS` names."""


def lower_cpu(
    portable: onnx.ModelProto, weights: Mapping[str, LazyTensor], target: OrtTarget
) -> Lowered:
    """Rewrite a portable graph; weights are read where the smallest format is looked for."""
    view, counts = canonical_view(portable, weights, target)
    # First of all: angles have its shape.
    view.graph.input.append(_value(POSITIONS, TensorProto.INT64, ["S"]))
    crossing = fuse_cross_attention(view)
    convolutions = fuse_convolutions(view, SLOTS, POSITIONS)
    experts = lower_experts(view)
    recurrences = lower_recurrences(view, target.geometry, SLOTS, POSITIONS, target.lag)
    attend(view, target, Attention(view, target), counts)
    if crossing:
        counts["cross_attention"] = crossing, crossing
    if convolutions:
        counts["convolution"] = convolutions, convolutions
        sink_transposes(view)
    if experts:
        counts["experts"] = experts, experts
    if recurrences:
        counts["recurrence"] = recurrences, recurrences
    _tabulate_angles(view, target.max_length)
    counts["gate_up"] = fuse_gates(view)
    _score_alone(view)
    fuse_the_rest(view, counts, biases=False)
    has_own = CONFIDENCE in view.outputs
    add_scores(view, target.confidence and not has_own)
    _pack(view, target)
    return emit(view, counts)


def emit(view: GraphView, counts: Counts) -> Lowered:
    """Return the graph with the kernels' products, and norms in them, and tables."""
    norms = len(view.nodes(*SKIP, *SKIP.values()))
    projections = _emit_projections(view)
    counts["norm"] = norms - len(view.nodes(*SKIP, *SKIP.values())), norms
    return finish(view, projections, _emit_embeddings(view), counts)


class Attention:
    """The kernels' attention, over KV buffers of several rows; a `FusedKernel`."""

    domain = SPECRT

    def __init__(self, view: GraphView, target: OrtTarget) -> None:
        self._view = view
        self._geometry, self._target = target.geometry, target
        self._biases: dict[tuple[str, int], str] = {}
        self._has_blocks = any(i.name == CONTEXT for i in view.graph.input)

    def nothing(self, layer: Layer) -> list[str]:
        """See `FusedKernel`."""
        return ["", ""]

    def rotates(self, layer: Layer, angles: int) -> bool:
        """See `FusedKernel`: it takes any."""
        return True

    def attributes(self, layer: Layer, rotates: bool) -> dict[str, Any]:
        """See `FusedKernel`; a window of 0 is none."""
        memory = self._geometry.memories[layer.index]
        length, width = self._target.max_length, self._target.max_width
        keys = self._geometry.inputs[f"key.{layer.index}"]
        optional = {
            "value_size": memory.value_width if memory.value_width != memory.key_width else 0,
            "shared": layer.shares,
            "ring": keys.positions(length, width) < length,
            "bidirectional": self._has_blocks and sees_ahead(self._view, layer),
        }
        return {
            "head_size": memory.key_width,
            "local_window_size": memory.seen,
            **{name: int(value) for name, value in optional.items() if value},
        }

    def lengths(self) -> list[str]:
        """See `FusedKernel`."""
        return [SLOTS, POSITIONS]

    def biases(self, layer: Layer) -> str:
        """See `FusedKernel`: what the layer's mask has where a key is seen, by its distance."""
        if self._has_blocks:
            return ""  # their masks say what is seen, and no more
        mask, window = layer.node.input[3], self._geometry.memories[layer.index].seen
        if (mask, window) not in self._biases:
            table = bias_by_distance(
                self._view, mask, self._geometry, window, self._target.max_length
            )
            stored = ""
            if table is not None:
                name = f"{self._view.fresh('biases')}.table"
                # The farthest first: keys rise, and their distances fall.
                stored = self._view.add_stored(in_memory(name, table[:, ::-1].copy()))
            self._biases[mask, window] = stored
        return self._biases[mask, window]


def _tabulate_angles(view: GraphView, max_length: int) -> None:
    """Look up the cosines and sines of rotations that attention does not take over.

    ```
    start ─ ... ─ Cos ─ y [1, S, R]      =>      table [max_length, R], positions ─ Gather ─ y
    ```
    Computed in a pass, an angle has other bits at the end of a vector than inside one.
    """
    axis = view.add_constant("axis", np.array([0], np.int64))
    for node in view.nodes("Cos", "Sin"):
        name = node.output[0]
        table = tabulate(view, Rotary("", name, name), max_length)[0]
        stored = view.add_stored(in_memory(f"{name}/table", table))
        places = view.add("Unsqueeze", [POSITIONS, axis])
        view.add("Gather", [stored, places], outputs=[name], axis=0)
    view.tidy()


def fuse_gates(view: GraphView) -> tuple[int, int]:
    """Compute gated feed-forward layers in one product; return how many, and of how many.

    ```
    x ─┬─ Projection gate ─ activation ─┐
       └─ Projection up ────────────── Mul ─ y    =>    x ─ Projection [gate, up in turns] ─ y
    ```
    The kernels know SiLU and the GELU by tanh; others, such as ReLU or the GELU by erf, stay
    outside, and so does a pair of which only one has a bias.
    """
    gates = gated(view)
    fused = 0
    for gate in gates:
        first, second = (find_projection(view, name) for name in (gate.gate, gate.up))
        if not gate.activation or first is None or second is None or first.x != second.x:
            continue
        if not first.matrix.fits(second.matrix) or (first.bias is None) != (second.bias is None):
            continue
        matrix = of_matrices(
            [first.matrix, second.matrix], lambda parts, suffix: alternating(*parts)
        )
        bias = _in_turns(first.bias, second.bias)
        node = view.maker(add_projection(view, first.x, matrix, bias, gate.product))
        assert node is not None
        node.attribute.append(helper.make_attribute("activation", gate.activation))
        node.attribute.append(helper.make_attribute("gates", first.matrix.outputs))
        fused += 1
    view.tidy()
    return fused, len(gates)


def _in_turns(gate: LazyTensor | None, up: LazyTensor | None) -> LazyTensor | None:
    return alternating(gate, up) if gate is not None and up is not None else None


_TOKEN_BY_TOKEN = {
    PROJECTION, CROSS_ATTENTION, *SKIP, "Add", "Sub", "Mul", "Div", "Sigmoid", "Tanh", "Gelu",
    "Relu", "Gather",
}  # fmt: skip


def _score_alone(view: GraphView) -> None:
    """Compute what lies after the last attention for those tokens alone that are scored.

    Attention to a source is one of those: a token asks no other what it comes to.

    ```
    y ─ Projection ─┐                              y ─ Gather rows ─ Projection ─┐
    x ─────────── Add ─ ... ─ Gather rows    =>    x ─ Gather rows ─────────── Add ─ ...
    ```
    """
    gathers = [node for node in view.nodes("Gather") if view.depends_on(node.input[1], ["rows"])]
    shapes = Shapes(view)
    whole = shapes.dims(gathers[0].input[0]) if len(gathers) == 1 else None
    if whole is None or view.attributes(gathers[0]).get("axis", 0) != 1:
        return
    last, rows = gathers[0].input

    def tokens(node: onnx.NodeProto) -> list[str]:
        return [
            name for name in node.input if view.depends_on(name, ["input_ids", HIDDEN, CONTEXT])
        ]

    def has_tokens(name: str) -> bool:
        dims = shapes.dims(name)
        return dims is not None and len(dims) == 3 and dims[:2] == whole[:2]

    def is_apart(node: onnx.NodeProto) -> bool:
        """Tell a Gather that orders what each token has from those that choose tokens."""
        return node.op_type != "Gather" or view.attributes(node).get("axis", 0) in (-1, 2)

    behind = [gathers[0]]  # nodes that nothing but scored tokens need, the last ones first
    for node in reversed(view.nodes(*_TOKEN_BY_TOKEN)):
        value = node.output[0]
        needed = all(any(reader is one for one in behind) for reader in view.readers(value))
        if not needed or value in view.outputs or not is_apart(node):
            continue
        if all(map(has_tokens, [value, *tokens(node)])):
            behind.append(node)
    made = {node.output[0] for node in behind[1:]}
    if last not in made:
        return
    places = {
        name: view.add("Gather", [name, rows], axis=1)
        for name in dict.fromkeys(name for node in behind[1:] for name in tokens(node))
        if name not in made
    }
    places[SLOTS] = view.add("Gather", [SLOTS, rows], axis=0)  # of attention to a source
    for node in behind[1:]:
        node.input[:] = [places.get(name, name) for name in node.input]
    view.replace(gathers[0].output[0], last)
    view.tidy()


def _pack(view: GraphView, target: OrtTarget) -> None:
    """Let a graph take the tokens of several rows as one sequence, [1, T].

    Everything but attention works token by token, and does not ask whose they are. Attention has
    KV buffers of all rows: keys in groups of 16 positions, `key.i` [B, kv_heads, P / 16, D, 16],
    and values in whole vectors, `value.i` [B, kv_heads, P, D]. Cross keys and values lie as those.
    Raises: BuildError for a graph in which tokens meet outside attention.
    """
    _declare(view, target)
    _hand_in_positions(view)
    view.tidy()
    wrong = view.readers("start") + view.readers("source_length")
    wrong += view.nodes("Range", "CumSum")
    wrong += [node for node in view.nodes("Attention") if node.domain != SPECRT]
    if wrong:
        kinds = ", ".join(sorted({n.op_type for n in wrong}))
        raise BuildError(
            "this model cannot be packed for a CPU: its attention or its positions are of a kind "
            f"that lowering does not know ({kinds}). Please report the architecture"
        )


def _declare(view: GraphView, target: OrtTarget) -> None:
    """Declare inputs and outputs of the packed graph."""
    batch, max_source = target.batch, target.max_source
    for value in (*view.graph.input, *view.graph.output):
        name = value.name.removeprefix("present_")
        shape = cross_shape(value, batch, max_source)
        if name in target.geometry.inputs:
            one = target.geometry.inputs[name]
            positions = one.positions(target.max_length, target.max_width)
            shape = packed_shape(name, one.heads, one.width, batch, positions)
        if name.startswith(f"{BASE}."):
            value.CopyFrom(_value(value.name, TensorProto.INT64, [batch]))
        if shape:
            value.CopyFrom(_value(value.name, TensorProto.FLOAT, shape))
    gone = "start", "source_length", POSITIONS, BASE
    inputs = [i for i in view.graph.input if i.name not in gone]
    inputs += [_value(name, TensorProto.INT64, ["T"]) for name in (SLOTS, POSITIONS)]
    if max_source:
        inputs.append(_value(LENGTHS, TensorProto.INT64, [batch]))
    del view.graph.input[:]
    view.graph.input.extend(inputs)


def _value(name: str, kind: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _hand_in_positions(view: GraphView) -> None:
    """Let positions be an input, where anything but attention reads them.

    ```
    start ─ Unsqueeze ─┐
    0, 1, ... ─ Range ─ Add ─ y      =>      positions [T] ─ Unsqueeze [1, T] ─ y
    ```
    """
    one = view.add_constant("rows", np.array([1], np.int64))
    for node in view.nodes("Shape"):
        if node.input[0] == "start":
            view.replace(node.output[0], one)  # the tokens of all rows are one sequence
    row, column = (view.add_constant("axis", np.array([axis], np.int64)) for axis in (0, 1))
    handed = view.add("Unsqueeze", [POSITIONS, row])
    for node in view.nodes("Add"):
        makers = [view.maker(name) for name in node.input]
        kinds = [one.op_type if one is not None else "" for one in makers]
        if sorted(kinds) != ["Range", "Unsqueeze"]:
            continue
        lifted = makers[kinds.index("Unsqueeze")]
        if lifted is not None and lifted.input[0] == "start":
            view.replace(node.output[0], handed)
    place = view.add("Unsqueeze", [POSITIONS, column])
    for node in view.nodes("RotaryEmbedding"):
        if node.input[1] == handed:
            _rotate_alone(view, node, place)


def _rotate_alone(view: GraphView, node: onnx.NodeProto, place: str) -> None:
    """Let a rotation take each token as a row of its own.

    ```
    x [1, T, N] ─ Rotary ─ y      =>      x ─ Reshape [T, 1, N] ─ Rotary ─ Reshape [1, T, N] ─ y
    ```
    Its kernel refuses a sequence longer than its tables, as rows side by side can be.
    """
    lone, row = (view.add_constant("shape", np.array(s)) for s in ([-1, 1, 0], [1, -1, 0]))
    x = view.add("Reshape", [node.input[0], lone])
    turned = view.add(
        "RotaryEmbedding", [x, place, *node.input[2:]], domain=MICROSOFT, **view.attributes(node)
    )
    view.add("Reshape", [turned, row], outputs=[node.output[0]])


def _emit_projections(view: GraphView) -> tuple[int, int]:
    """Replace projections by the kernels' product; return how many in codes, and of how many.

    ```
    x, W (, bias) ─ Projection ─ y      =>      x, tiles (, bias) ─ MatMul ─ y
    ```
    A norm that nothing but products read is part of them; see `_normed`.
    """
    view.require_domain(SPECRT, 1)
    quantized = emitted = 0
    for node in view.nodes(PROJECTION):
        projection = read_projection(view, node)
        quantized += projection.matrix.scales is not None
        emitted += has_codes(projection.matrix)
        values, attributes = add_tiles(view, projection.matrix)
        bias = projection.bias and view.add_stored(whole_tiles(projection.bias))
        stated = view.attributes(node)
        if "gates" in stated:  # what a row of the product is, without the tiles' padding
            attributes["N"] = 2 * stated["gates"]
        norm = _normed(view, projection.x)
        view.add(
            "MatMul", _trimmed([norm.x, values, bias or "", *norm.inputs]),
            outputs=[projection.output, *norm.outputs], domain=SPECRT,
            activation=stated.get("activation", b"none").decode(), exact=0, norm=norm.kind,
            epsilon=norm.epsilon, **attributes,
        )  # fmt: skip
    view.tidy()
    return emitted, quantized


def _trimmed(inputs: list[str]) -> list[str]:
    """Return inputs without those that are left out at the end."""
    return inputs[: max(i for i, name in enumerate(inputs) if name) + 1]


class Normed(NamedTuple):
    """What a product reads, and the norm that it computes first."""

    x: str
    kind: str = "none"
    epsilon: float = 0.0
    inputs: Sequence[str] = ()
    """The residual, the norm's weight and its bias."""
    outputs: Sequence[str] = ()
    """What x and the residual come to."""


def _normed(view: GraphView, x: str) -> Normed:
    """Return the norm that makes a value, if products alone read it.

    ```
    x, residual, weight ─ norm ─┬─ y ─ Projection
                                └─ sum                =>   x, ..., residual, weight ─ MatMul ─ sum
    ```
    The first of its products makes the sum; for the others, the sum is normed once more.
    """
    norm = view.maker(x)
    if norm is None or norm.op_type not in (*SKIP, *SKIP.values()):
        return Normed(x)
    plain = {with_residual: without for without, with_residual in SKIP.items()}
    adds = norm.op_type in plain
    scales = list(norm.input[1 + adds :])
    readers = view.readers(x)
    alone = x not in view.outputs and all(node.op_type == PROJECTION for node in readers)
    if not alone or any(view.stored(name) is None for name in scales):
        return Normed(x)
    epsilon = view.attributes(norm).get("epsilon", 1e-5)
    kind = "rms" if "Simplified" in norm.op_type else "layer"
    if not adds:
        return Normed(norm.input[0], kind, epsilon, ["", *scales])
    total = norm.output[3] if len(norm.output) > 3 else ""
    if len(readers) > 1:
        total = total or view.fresh("sum")
        view.add(plain[norm.op_type], [total, *scales], outputs=[x], axis=-1, epsilon=epsilon)
    return Normed(norm.input[0], kind, epsilon, [norm.input[1], *scales], [total] if total else [])


def _emit_embeddings(view: GraphView) -> tuple[int, int]:
    """Look rows up in tiles; return how many tables in codes, and of how many quantized ones.

    ```
    W [N, K], tokens ─ Gather ─ y      =>      tokens, tiles ─ Embedding ─ y
    ```
    A tied table is stored once: its tiles are those that the last projection reads.
    """
    total = emitted = 0
    for node in view.nodes("Gather"):
        matrix = find_matrix(view, node.input[0])
        if matrix is None or view.attributes(node).get("axis", 0) != 0:
            continue
        chosen = view.depends_on(node.input[1], ["input_ids"], shapes=False)
        if matrix.scales is None and not chosen:
            continue
        total += matrix.scales is not None
        emitted += has_codes(matrix)
        values, attributes = add_tiles(view, matrix)
        view.add(
            "Embedding", [node.input[1], values], outputs=[node.output[0]], domain=SPECRT,
            **attributes,
        )  # fmt: skip
    view.tidy()
    return emitted, total
