"""Rules about which operators TensorRT knows, and which of their attributes."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from specrt_export.lint.facts import SINCE, STANDARD, Facts, Fault, Rule, Version, each, label

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
    return f"its axes {name} are no constant"


def _candidates(facts: Facts, node: onnx.NodeProto) -> str | None:
    count = facts.constant(node.input[1]) if len(node.input) > 1 else None
    if count is None or count.size != 1 or count.dtype.kind not in "iu":
        return None
    asked = int(count.reshape(-1)[0])
    return (
        f"it asks for {asked} values of {MOST_CANDIDATES} at most"
        if asked > MOST_CANDIDATES
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
