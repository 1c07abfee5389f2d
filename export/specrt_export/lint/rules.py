"""What a lint knows of a graph, and the rules about its operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

Severity = Literal["refused", "dropped", "slow"]


SEVERITIES: tuple[Severity, ...] = ("refused", "dropped", "slow")


Fault = tuple[str, str]
"""The node (or tensor) at fault, and why."""


NodeFault = Callable[["Facts", onnx.NodeProto], "str | None"]
"""What says why a node is at fault, or that it is not."""


TESTED = "parser and builder of TensorRT for RTX 1.7.1"


@dataclass(frozen=True)
class Finding:
    """One fault of one node: `refused` by TensorRT, silently `dropped` or changed, or `slow`."""

    rule: str
    node: str
    severity: Severity
    reason: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    """One thing TensorRT does not take as written; `source` says how that is known."""

    name: str
    severity: Severity
    faults: Callable[[Facts], Iterable[Fault]]
    remedy: str
    source: str = TESTED


def each(*op_types: str, fault: NodeFault) -> Callable[[Facts], Iterator[Fault]]:
    """Ask every node of some operators that the version knows."""

    def faults(facts: Facts) -> Iterator[Fault]:
        for node in facts.nodes(*op_types):
            whole = bool(node.output) and (bool(node.input) or node.op_type == "Constant")
            known = whole and not facts.too_old_for(node.op_type)
            reason = fault(facts, node) if known else None
            if reason is not None:
                yield label(node), reason

    return faults


def label(node: onnx.NodeProto) -> str:
    """Name a node, also one without a name."""
    return node.name or f"{node.op_type} of {next(filter(None, node.output), 'nothing')}"


Version = tuple[int, int]


Shape = tuple[int | str | None, ...]


SINCE: dict[str, Version] = {
    "Attention": (10, 14),
    "RMSNormalization": (10, 15),
    "RotaryEmbedding": (10, 15),
    "TensorScatter": (10, 15),
    "TRT_Attention": (11, 0),
    "TRT_KVCacheUpdate": (11, 0),
}
"""The TensorRT that first parses an operator. Source: the parser's changelog, 10.14 and 10.15."""


STANDARD = ("", "ai.onnx")


KNOWN_ELEMENTS = 64
"""Constants up to this size matter to shapes; larger ones are weights."""


class Facts:
    """Index over one model, its control-flow bodies and local functions included."""

    def __init__(
        self, model: onnx.ModelProto, version: Version, folder: Path | None = None
    ) -> None:
        self.model, self.version, self.folder = model, version, folder
        self.functions = {(f.domain, f.name) for f in model.functions}
        self.inputs = {i.name for i in model.graph.input}
        self.outputs = {o.name for o in model.graph.output}
        self.tensors: dict[str, onnx.TensorProto] = {}
        self._nodes: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self._maker: dict[str, onnx.NodeProto] = {}
        self._readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in _all_nodes(model):
            self._index(node)
        for graph in _all_graphs(model.graph):
            self.tensors |= {t.name: t for t in graph.initializer}
        self._types = {
            v.name: v.type for v in _values(_inferred(model)) if v.type.WhichOneof("value")
        }

    def _index(self, node: onnx.NodeProto) -> None:
        self._nodes[node.op_type].append(node)
        for name in filter(None, node.output):
            self._maker[name] = node
        for name in filter(None, node.input):
            self._readers[name].append(node)
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.name == "value":
                    self.tensors[node.output[0]] = attribute.t

    def nodes(self, *op_types: str) -> Iterator[onnx.NodeProto]:
        """Yield the nodes of some standard operators; of any and all when none is named."""
        for op_type in op_types or tuple(self._nodes):
            for node in self._nodes.get(op_type, ()):
                if not op_types or node.domain in STANDARD:
                    yield node

    def too_old_for(self, op_type: str) -> bool:
        """Tell whether the version is older than an operator."""
        return self.version < SINCE.get(op_type, (0, 0))

    def maker(self, name: str) -> onnx.NodeProto | None:
        """Return the node that makes a value."""
        return self._maker.get(name)

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value."""
        return self._readers.get(name, [])

    def states(self, node: onnx.NodeProto, name: str) -> bool:
        """Tell whether a node states an attribute."""
        return any(a.name == name for a in node.attribute)

    def integer(self, node: onnx.NodeProto, name: str, default: int = 0) -> int:
        """Return an integer attribute; the default where there is none of that type."""
        kind = onnx.AttributeProto.INT
        return next((a.i for a in node.attribute if a.name == name and a.type == kind), default)

    def number(self, node: onnx.NodeProto, name: str, default: float = 0.0) -> float:
        """Return a float attribute; the default where there is none of that type."""
        kind = onnx.AttributeProto.FLOAT
        return next((a.f for a in node.attribute if a.name == name and a.type == kind), default)

    def text(self, node: onnx.NodeProto, name: str, default: str = "") -> str:
        """Return a text attribute; the default where there is none of that type."""
        kind = onnx.AttributeProto.STRING
        texts = (a.s for a in node.attribute if a.name == name and a.type == kind)
        return next((s.decode(errors="replace") for s in texts), default)

    def type(self, name: str) -> int | None:
        """Return the element type of a tensor, where it is known."""
        if name in self.tensors:
            return self.tensors[name].data_type
        proto = self._types.get(name)
        kind = proto.tensor_type.elem_type if proto is not None else 0
        return kind or None

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor, where its rank is known."""
        if name in self.tensors:
            return tuple(self.tensors[name].dims)
        proto = self._types.get(name)
        if proto is None or not proto.tensor_type.HasField("shape"):
            return None
        kinds = [(d.WhichOneof("value"), d) for d in proto.tensor_type.shape.dim]
        return tuple(getattr(d, kind) if kind else None for kind, d in kinds)

    def constant(self, name: str) -> NDArray[Any] | None:
        """Return the values of a constant held in the graph itself, else None."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        try:
            return np.asarray(numpy_helper.to_array(tensor))
        except Exception:  # fewer bytes than its shape asks for, or an unknown type
            return None

    def stored(self, name: str) -> NDArray[Any] | None:
        """Return the values of a constant, bytes next to the graph included, else None."""
        tensor, known = self.tensors.get(name), self.constant(name)
        if tensor is None or known is not None or self.folder is None:
            return known
        try:
            return np.asarray(numpy_helper.to_array(tensor, str(self.folder)))
        except Exception:  # a rule of its own says what is wrong with the file
            return None

    def through(self, name: str, *op_types: str) -> str:
        """Follow a value back through some operators; return where it comes from."""
        seen = {name}
        while (node := self._maker.get(name)) is not None and node.op_type in op_types:
            if not node.input or node.input[0] in seen:
                break
            name = node.input[0]
            seen.add(name)
        return name


def type_name(kind: int) -> str:
    """Name an element type, also one this version of ONNX does not know."""
    known = kind in onnx.TensorProto.DataType.values()
    return str(onnx.TensorProto.DataType.Name(kind)).lower() if known else f"type {kind}"


def _all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        yield from _bodies(node)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            if body.node or body.output:
                yield from _all_graphs(body)


def _all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in _all_graphs(model.graph):
        yield from graph.node
    for function in model.functions:
        for node in function.node:
            yield node
            for graph in _bodies(node):
                yield from graph.node


def _values(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    for graph in _all_graphs(model.graph):
        yield from (*graph.input, *graph.output, *graph.value_info)


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with the types and shapes that ONNX finds, and without any weight."""
    slim = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    slim.functions.extend(model.functions)
    slim.graph.node.extend(model.graph.node)
    slim.graph.input.extend(model.graph.input)
    slim.graph.output.extend(model.graph.output)
    slim.graph.value_info.extend(model.graph.value_info)
    for tensor in model.graph.initializer:
        if np.prod(tensor.dims, dtype=np.float64) <= KNOWN_ELEMENTS:
            slim.graph.initializer.append(tensor)
        else:
            slim.graph.initializer.add(
                name=tensor.name, data_type=tensor.data_type, dims=tensor.dims
            )
    try:
        return onnx.shape_inference.infer_shapes(slim, data_prop=True)
    except Exception:  # the library passes on whatever its C++ raises; rules then see less
        return slim


# fmt: off
UNSUPPORTED = frozenset({
    "AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
    "BitwiseXor", "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger",
    "CumProd", "DFT", "DeformConv", "Det", "DynamicQuantizeLinear", "ImageDecoder",
    "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial",
    "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement", "OptionalHasElement",
    "QLinearConv", "QLinearMatMul", "RegexFullMatch", "SequenceAt", "SequenceConstruct",
    "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
    "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat", "StringNormalizer",
    "StringSplit", "SwiGLU", "TfIdfVectorizer", "Unique",
})
# fmt: on
"""Standard operators the parser does not know; a test asks the parser for all of them."""


OWN = frozenset({"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"})
"""Operators outside the standard that the parser takes without a plugin."""


OWN_PREFIX = "TRT_"


DECOMPOSED = (
    'name the version in the recipe (`version = "10.3"` in `[tensorrt]`), and the graph is lowered '
    "to ScatterElements, MatMul and Softmax"
)


OLDEST_OPSET = 9


NEWEST_OPSET: tuple[tuple[Version, int], ...] = (((11, 5), 25), ((10, 15), 24), ((10, 0), 21))
"""The newest opset each version documents; those between keep the older word. Source: the parser's
tables of operators for 10.0 (20, and int4 in blocks, which is of 21) and 10.15, and the release
notes of 11.5."""


MOST_CANDIDATES = 3840


REDUCTIONS = tuple(
    f"Reduce{kind}"
    for kind in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()  # noqa: SIM905
)


def _too_new(facts: Facts) -> Iterator[Fault]:
    for node in facts.nodes():
        if facts.too_old_for(node.op_type):
            first = ".".join(map(str, SINCE[node.op_type]))
            yield label(node), f"{node.op_type} came with TensorRT {first}"


def _foreign(facts: Facts, node: onnx.NodeProto) -> bool:
    own = node.op_type in OWN or node.op_type.startswith(OWN_PREFIX)
    return not own and (node.domain, node.op_type) not in facts.functions


def _is_standard(op_type: str) -> bool:
    return onnx.defs.has(op_type) and op_type not in UNSUPPORTED


def _unknown(facts: Facts) -> Iterator[Fault]:
    for node in facts.nodes():
        if _foreign(facts, node) and not _is_standard(node.op_type):
            domain = "" if node.domain in STANDARD else f" of {node.domain}"
            yield label(node), f"{node.op_type}{domain} is not an operator TensorRT knows"


def _misread(facts: Facts) -> Iterator[Fault]:
    for node in facts.nodes():
        outside = node.domain not in STANDARD and _foreign(facts, node)
        if outside and _is_standard(node.op_type):
            yield (
                label(node),
                f"the parser does not read domains, and takes {node.domain}.{node.op_type} for "
                f"ONNX's {node.op_type}",
            )


def _opset(facts: Facts) -> Iterator[Fault]:
    newest = next((opset for since, opset in NEWEST_OPSET if facts.version >= since), None)
    for entry in facts.model.opset_import:
        if entry.domain not in STANDARD or newest is None:
            continue
        if not OLDEST_OPSET <= entry.version <= newest:
            yield (
                "opset",
                f"the graph is of opset {entry.version}, and TensorRT "
                f"{'.'.join(map(str, facts.version))} documents {OLDEST_OPSET} to {newest}; the "
                "parser does not check, and reads other opsets by the rules it has",
            )


def _extra_outputs(facts: Facts, node: onnx.NodeProto) -> str | None:
    return f"it has {len(node.output)} outputs, also unused" if len(node.output) > 1 else None


def _reduction(facts: Facts, node: onnx.NodeProto) -> str | None:
    kind = facts.text(node, "reduction", "none")
    return f"its reduction is {kind!r}" if kind != "none" else None


def _axes(facts: Facts, node: onnx.NodeProto) -> str | None:
    name = node.input[1] if len(node.input) > 1 else ""
    end = facts.through(name, "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
    constant = end in facts.tensors or facts.maker(end) is not None
    if not name or constant or end not in facts.inputs:
        return None
    return f"its axes {name} are not constant"


def _candidates(facts: Facts, node: onnx.NodeProto) -> str | None:
    count = facts.constant(node.input[1]) if len(node.input) > 1 else None
    if count is None or count.size != 1 or count.dtype.kind not in "iu":
        return None
    wanted = int(count.reshape(-1)[0])
    return (
        f"it asks for {wanted} values of {MOST_CANDIDATES} at most"
        if wanted > MOST_CANDIDATES
        else None
    )


def _control_flow(facts: Facts, node: onnx.NodeProto) -> str | None:
    return f"{node.op_type} splits the plan, and a pass with it may not fit into a CUDA graph"


def _text(facts: Facts, node: onnx.NodeProto) -> str | None:
    kinds = ("sparse_value", "value_string", "value_strings")
    return next((f"it holds a {kind}" for kind in kinds if facts.states(node, kind)), None)


OPERATOR_RULES = (
    Rule("operator-version", "refused", _too_new, DECOMPOSED, "the parser's changelog"),
    Rule("operator-unknown", "refused", _unknown, "write it out in standard operators"),
    Rule("operator-misread", "dropped", _misread, "write it out in standard operators"),
    Rule(
        "opset",
        "dropped",
        _opset,
        "state an opset the version documents, once no node needs a newer one",
        "the parser's tables of operators",
    ),
    Rule(
        "norm-outputs",
        "refused",
        each("LayerNormalization", fault=_extra_outputs),
        "leave out the mean and deviation, or write the norm out",
    ),
    Rule(
        "scatter-reduction",
        "refused",
        each("ScatterND", "ScatterElements", fault=_reduction),
        "scatter without a reduction, and add after",
    ),
    Rule("reduce-axes", "refused", each(*REDUCTIONS, fault=_axes), "make the axes a constant"),
    Rule("topk-count", "refused", each("TopK", fault=_candidates), "ask for fewer candidates"),
    Rule(
        "control-flow",
        "slow",
        each("If", "Loop", "Scan", fault=_control_flow),
        "unroll it, or decide it outside the graph",
    ),
    Rule(
        "constant-kind", "refused", each("Constant", fault=_text), "use a dense tensor of numbers"
    ),
)
