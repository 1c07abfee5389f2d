"""The lint and its command: a graph with a fault, the same repaired, and nothing else found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from specrt import cli
from specrt_export.lint import RULES, lint
from specrt_export.lint.rules import TESTED

Graph = onnx.ModelProto
F16, F32, I64 = T.FLOAT16, T.FLOAT, T.INT64
RNG = np.random.default_rng(0)
S = "S"
Said = pytest.CaptureFixture[str]
node = helper.make_node


def constant(array: Any, name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array), name)


def value(name: str, kind: int, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    tensors: Sequence[onnx.TensorProto] = (),
    opset: int = 24,
    domain: str = "",
) -> Graph:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(tensors))
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def attention(
    kind: int = F16,
    heads: int = 4,
    key_heads: int = 2,
    width: int = 16,
    tokens: int | str = S,
    mask: int | None = F16,
    outputs: Sequence[str] = ("y",),
    more: dict[int, onnx.ValueInfoProto] | None = None,
    **attributes: Any,
) -> Graph:
    """Attention over a buffer of 32 positions; `more` are inputs by index."""
    kv = [1, key_heads, 32, width]
    inputs = {0: value("q", kind, [1, heads, tokens, width]), 1: value("k", kind, kv)}
    inputs[2] = value("v", kind, kv)
    if mask is not None:
        inputs[3] = value("m", mask, [1, 1, tokens, 32])
    inputs |= more or {}
    names = [inputs[i].name if i in inputs else "" for i in range(max(inputs) + 1)]
    made = [value(o, kind, [1, heads, tokens, width] if o == "y" else None) for o in outputs]
    nodes = [node("Attention", names, list(outputs), name="n", **attributes)]
    return model(nodes, list(inputs.values()), made)


def scatter(
    kind: int = F16,
    cache: Sequence[int | str] = (1, 2, 32, 16),
    update: Sequence[int | str] = (1, 2, S, 16),
    update_kind: int | None = None,
    **attributes: Any,
) -> Graph:
    stated = {"axis": -2, **attributes}
    return model(
        [node("TensorScatter", ["c", "u", "i"], ["p"], name="n", **stated)],
        [value("c", kind, cache), value("u", update_kind or kind, update), value("i", I64, [1])],
        [value("p", kind, cache)],
    )


def scatter_beside(other: onnx.NodeProto, reads: str = "c", result: str = "p") -> Graph:
    """A cache update with another node before or after it."""
    graph = scatter()
    graph.graph.node[0].input[0] = reads
    graph.graph.node.insert(0, other)
    graph.graph.output[0].name = result
    return graph


def two_scatters(second: str) -> Graph:
    graph = scatter()
    inputs = [value("w", F16, [1, 2, S, 16]), value("d", F16, [1, 2, 32, 16])]
    graph.graph.input.extend(inputs)
    graph.graph.output.append(value("r", F16, [1, 2, 32, 16]))
    graph.graph.node.append(node("TensorScatter", [second, "w", "i"], ["r"], name="o", axis=-2))
    return graph


def quantized(
    kind: int, axis: int, block: int = 0, zero: int | None = None, scale: float = 0.1
) -> Graph:
    """x @ dequantised w, [K, N]; the scales lie along `axis`, or along its blocks."""
    scales = [64 // block if i == axis else 64 for i in (0, 1)] if block else [64]
    tensors = [
        helper.make_tensor("w", kind, [64, 64], [1] * 64**2),
        constant(np.full(scales, scale, np.float16), "s"),
    ]
    if zero is not None:
        tensors.append(helper.make_tensor("z", kind, scales, [zero] * int(np.prod(scales))))
    stated: dict[str, Any] = {"axis": axis} | ({"block_size": block} if block else {})
    names = [tensor.name for tensor in tensors]
    nodes = [
        node("DequantizeLinear", names, ["d"], name="n", **stated),
        node("MatMul", ["x", "d"], ["y"]),
    ]
    return model(nodes, [value("x", F16, [S, 64])], [value("y", F16, [S, 64])], tensors)


def codes_through(*nodes: onnx.NodeProto) -> Graph:
    tensors = [constant(np.ones((4, 4), np.int8), "w"), constant(np.float32(0.1), "s")]
    return simple(*nodes, node("MatMul", ["x", "d"], ["y"]), tensors=tensors)


def product(transposed: bool) -> Graph:
    shape = (512, 256) if transposed else (256, 512)
    weight = constant(RNG.standard_normal(shape).astype(np.float16), "w")
    turn = [node("Transpose", ["w"], ["t"], perm=[1, 0])] if transposed else []
    nodes = [*turn, node("MatMul", ["x", "t" if transposed else "w"], ["y"], name="n")]
    return model(nodes, [value("x", F16, [S, 256])], [value("y", F16, [S, 512])], [weight])


def simple(
    *nodes: onnx.NodeProto, kind: int = F32, tensors: Any = (), more: Any = (), **changes: Any
) -> Graph:
    """Nodes from x [S, 4] to y [S, 4]."""
    inputs = [value("x", kind, [S, 4]), *more]
    return model(list(nodes), inputs, [value("y", kind, [S, 4])], tensors, **changes)


def relu() -> Graph:
    return simple(node("Relu", ["x"], ["y"]))


def typed(kind: int) -> Graph:
    return simple(node("Identity", ["x"], ["y"]), kind=kind)


def cast(kind: int) -> Graph:
    nodes = node("Cast", ["x"], ["z"], to=kind), node("Cast", ["z"], ["y"], to=F32)
    return simple(*nodes)


def added(array: Any, kind: int = F32) -> Graph:
    return simple(node("Add", ["x", "k"], ["y"]), kind=kind, tensors=[constant(array, "k")])


def lowered_mask(smallest: float) -> Graph:
    nodes = node("Cast", ["k"], ["h"], to=F16), node("Add", ["x", "h"], ["y"])
    return simple(*nodes, kind=F16, tensors=[constant(np.float32(smallest), "k")])


def norm(*outputs: str) -> Graph:
    weight = constant(np.ones(4, np.float32), "g")
    return simple(node("LayerNormalization", ["x", "g"], ["y", *outputs]), tensors=[weight])


def scattered(reduction: str) -> Graph:
    index, update = np.zeros((1, 2), np.int64), np.ones(1, np.float32)
    tensors = [constant(index, "i"), constant(update, "u")]
    return simple(node("ScatterND", ["x", "i", "u"], ["y"], reduction=reduction), tensors=tensors)


def reduced(axes_given: bool) -> Graph:
    given = [value("a", I64, [1])] if axes_given else []
    tensors = [] if axes_given else [constant(np.array([1]), "a")]
    nodes = node("ReduceSum", ["x", "a"], ["t"], keepdims=1), node("Add", ["x", "t"], ["y"])
    return simple(*nodes, more=given, tensors=tensors)


def best(count: int) -> Graph:
    nodes = [node("TopK", ["x", "k"], ["v", "y"])]
    tensors = [constant(np.array([count]), "k")]
    return model(nodes, [value("x", F32, [S, 8000])], [value("y", I64, None)], tensors)


def branched() -> Graph:
    bodies = [
        helper.make_graph([node(op, ["x"], [out])], op, [], [value(out, F32, [S, 4])])
        for op, out in (("Neg", "a"), ("Abs", "b"))
    ]
    both = {"then_branch": bodies[0], "else_branch": bodies[1]}
    return simple(node("If", ["c"], ["y"], **both), more=[value("c", T.BOOL, [])])


def sequence() -> Graph:
    inputs = [helper.make_tensor_sequence_value_info("q", F32, [S, 4]), value("x", F32, [S, 4])]
    return model([node("Relu", ["x"], ["y"])], inputs, [value("y", F32, [S, 4])])


def sparse() -> Graph:
    graph = simple(node("Add", ["x", "k"], ["y"]))
    values, index = constant(np.ones(1, np.float32), "k"), constant(np.zeros(1, np.int64), "")
    graph.graph.sparse_initializer.append(helper.make_sparse_tensor(values, index, [4]))
    return graph


@dataclass(frozen=True)
class Case:
    """A fault, its repair, and part of TensorRT's refusal, or "" where it builds all the same."""

    rule: str
    fault: Callable[[], Graph]
    repaired: Callable[[], Graph]
    says: str = ""
    widths: tuple[tuple[int, int, int], ...] = ((1, 4, 8),)
    name: str = ""


ONE = ((1, 1, 1),)
BOTH = ((2, 4, 8), (1, 1, 1))
MICROSOFT = "com.microsoft"
KERNEL = "not supported by a dedicated kernel"
CASES = (
    Case("operator-unknown", lambda: simple(node("Det", ["x"], ["y"])), relu, "checkDet"),
    Case("operator-unknown",
         lambda: simple(node("FastGelu", ["x"], ["y"], domain=MICROSOFT), domain=MICROSOFT),
         lambda: simple(node("Gelu", ["x"], ["y"])), "Plugin not found", name="microsoft"),
    Case("operator-misread",
         lambda: simple(node("Relu", ["x"], ["y"], domain="acme"), domain="acme"), relu),
    Case("opset", lambda: simple(node("Relu", ["x"], ["y"]), opset=99), relu),
    Case("norm-outputs", lambda: norm("mean", "deviation"), norm,
         "outputs for LayerNormalization"),
    Case("scatter-reduction", lambda: scattered("add"), lambda: scattered("none"), "reduction"),
    Case("reduce-axes", lambda: reduced(True), lambda: reduced(False), "build-time constant"),
    Case("topk-count", lambda: best(3841), lambda: best(3840), "exceeds the maximum"),
    Case("control-flow", branched, relu),
    Case("constant-kind",
         lambda: simple(node("Constant", [], ["w"], value_string="a"), node("Relu", ["x"], ["y"])),
         relu, "value_string"),
    Case("attention-outputs", lambda: attention(outputs=("y", "pk", "pv")), attention,
         "one output"),
    Case("attention-past",
         lambda: attention(more={i: value(f"p{i}", F16, [1, 2, 32, 16]) for i in (4, 5)}),
         attention, "past_key"),
    Case("attention-softcap", lambda: attention(softcap=30.0), attention, "softcap"),
    Case("attention-precision", lambda: attention(softmax_precision=1), attention,
         "softmax precision"),
    Case("attention-lengths", lambda: attention(more={6: value("len", I64, [1])}), attention),
    Case("attention-causal-mask", lambda: attention(is_causal=1), attention, "Invalid Node"),
    Case("attention-causal", lambda: attention(is_causal=1, mask=None), attention),
    Case("attention-kernel", lambda: attention(F32, mask=F32),
         lambda: attention(F32, mask=F32, TRT_decomposable=1), KERNEL, name="fp32"),
    Case("attention-kernel", lambda: attention(heads=3, key_heads=1),
         lambda: attention(heads=3, key_heads=1, TRT_decomposable=1), KERNEL, ONE, name="heads"),
    Case("attention-groups", lambda: attention(heads=5), attention, "Invalid Node"),
    Case("attention-type", lambda: attention(T.INT8, mask=T.INT8), attention, "Invalid Node"),
    Case("attention-mask-type", lambda: attention(mask=F32), attention, "element type"),
    Case("attention-mask-bool", lambda: attention(mask=T.BOOL), attention, widths=((4, 4, 4),)),
    Case("cache-mode", lambda: scatter(mode="circular"), scatter, "Only linear mode"),
    Case("cache-rank", lambda: scatter(cache=(1, 32, 16), update=(1, S, 16)), scatter, "4D"),
    Case("cache-axis", lambda: scatter(cache=(1, 32, 2, 16), update=(1, S, 2, 16), axis=1),
         lambda: scatter(axis=2), "must be -2"),
    Case("cache-length", lambda: scatter(cache=(1, 2, "M", 16)), scatter, "Invalid Node"),
    Case("cache-type", lambda: scatter(T.INT8), scatter, "Invalid Node"),
    Case("cache-update-type", lambda: scatter(update_kind=F32), scatter, "Invalid Node"),
    Case("cache-input",
         lambda: scatter_beside(node("Identity", ["c"], ["c2"], name="b"), reads="c2"), scatter,
         "must be a network input"),
    Case("cache-output",
         lambda: scatter_beside(node("Identity", ["p"], ["z"], name="a"), result="z"), scatter,
         "must be a network output"),
    Case("cache-twice", lambda: two_scatters("c"), lambda: two_scatters("d"), "already mapped"),
    Case("quantized-type", lambda: quantized(T.UINT8, 1), lambda: quantized(T.INT8, 1), "UINT8"),
    Case("quantized-zero-point", lambda: quantized(T.INT8, 1, zero=3),
         lambda: quantized(T.INT8, 1, zero=0), "Non-zero zero point"),
    Case("quantized-blocks", lambda: quantized(T.INT8, 0, 32), lambda: quantized(T.INT8, 1),
         widths=((2, 4, 8),)),
    Case("quantized-rows", lambda: quantized(T.INT4, 1), lambda: quantized(T.INT4, 0, 32),
         widths=((2, 4, 8),)),
    Case("quantized-constant",
         lambda: codes_through(node("Transpose", ["w"], ["t"], perm=[1, 0]),
                               node("DequantizeLinear", ["t", "s"], ["d"])),
         lambda: codes_through(node("DequantizeLinear", ["w", "s"], ["t"]),
                               node("Transpose", ["t"], ["d"], perm=[1, 0])),
         "only allowed before DQ"),
    Case("type-unsupported", lambda: typed(T.UINT16), lambda: typed(T.INT32),
         "Failed to convert"),
    Case("type-double", lambda: typed(T.DOUBLE), lambda: typed(F32)),
    Case("type-byte", lambda: cast(T.UINT8), lambda: cast(T.INT32), "does not support UINT8"),
    Case("type-container", sequence, relu, "Failed to convert"),
    Case("type-sparse", sparse, lambda: added(np.ones(4, np.float32)), "was not registered"),
    Case("type-mixed", lambda: added(np.float32(1), F16), lambda: added(np.float16(1), F16),
         "Invalid Node"),
    Case("type-overflow", lambda: lowered_mask(-3.4e+38), lambda: lowered_mask(-65504)),
    Case("weight-layout", lambda: product(False), lambda: product(True), widths=BOTH),
)  # fmt: skip
NAMES = [f"{case.rule}-{case.name}".rstrip("-") for case in CASES]
ELSEWHERE = {"weight-outside", "weight-missing", "weight-size"}
"""Rules about files, which the parser is shown in files."""
NOT_TRIED = {"operator-version", "opset", "attention-rank", "type-fp4", "quantized-scales"}
"""Rules about other versions than the one that tests have."""


def found(graph: Graph, version: tuple[int, int] = (11, 0)) -> set[str]:
    return {finding.rule for finding in lint(graph, version)}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_fault_alone_is_found(case: Case) -> None:
    assert found(case.fault()) == {case.rule}
    assert found(case.repaired()) == set()


def test_every_rule_that_can_be_tried_has_a_case() -> None:
    tried = {rule.name for rule in RULES if rule.source == TESTED}
    assert tried <= {case.rule for case in CASES} | ELSEWHERE
    assert {rule.name for rule in RULES} - tried == NOT_TRIED
    severity = {rule.name: rule.severity for rule in RULES}
    for case in CASES:
        assert (severity[case.rule] == "refused") == bool(case.says), case.rule


def test_what_changed_between_versions() -> None:
    flat = [value(n, F16, [1, S, 64]) for n in "qkv"]
    nodes = [node("Attention", list("qkv"), ["y"], q_num_heads=4, kv_num_heads=4)]
    graph = model(nodes, flat, [value("y", F16, [1, S, 64])])
    assert found(graph, (10, 15)) == {"attention-rank"}
    assert found(graph, (11, 0)) == set()
    assert found(quantized(T.INT4, 0, 32, scale=-0.1)) == {"quantized-scales"}
    assert found(quantized(T.FLOAT4E2M1, 0, 16), (10, 7)) == {"type-fp4", "opset"}
    assert found(quantized(T.FLOAT4E2M1, 0, 16), (10, 15)) == set()
    assert found(simple(node("Relu", ["x"], ["y"]), opset=21), (10, 3)) == set()
    assert found(simple(node("Relu", ["x"], ["y"]), opset=22), (10, 3)) == {"opset"}


def test_graphs_within_a_graph_are_read() -> None:
    graph = branched()
    graph.graph.node[0].attribute[0].g.node[0].op_type = "Det"
    assert found(graph) == {"control-flow", "operator-unknown"}
    opsets, body = [helper.make_opsetid("", 24)], [node("Add", ["a", "a"], ["b"])]
    twice = helper.make_function("acme", "Twice", ["a"], ["b"], body, opsets)
    graph = simple(node("Twice", ["x"], ["y"], domain="acme"), domain="acme")
    assert found(graph) == {"operator-unknown"}
    graph.functions.append(twice)
    assert found(graph) == set()
    graph = attention(mask=T.BOOL, softcap=2.0, more={6: value("len", I64, [1])})
    assert [f.severity for f in lint(graph)] == ["refused", "dropped", "slow"], "the worst first"


ODD_OPERATORS = [
    "Attention", "TensorScatter", "DequantizeLinear", "MatMul", "Gemm", "Cast", "TopK", "Where",
    "Constant", "Identity", "ReduceSum", "ScatterND", "LayerNormalization", "Nonsense", "If",
]  # fmt: skip
ODD_NAMES = st.sampled_from(["x", "y", "z", ""])
ODD_NODES = st.builds(
    lambda op, ins, outs, stated: node(op, ins, outs, **stated),
    st.sampled_from(ODD_OPERATORS),
    st.lists(ODD_NAMES, max_size=7),
    st.lists(ODD_NAMES, max_size=3),
    st.dictionaries(
        st.sampled_from(["axis", "to", "mode", "softcap", "is_causal", "block_size", "value"]),
        st.one_of(st.integers(-3, 99), st.floats(-1, 1), st.just("odd"), st.just([1, 2])),
        max_size=4,
    ),
)


@given(
    st.lists(ODD_NODES, max_size=6),
    st.sampled_from([F16, F32, T.INT4, T.STRING, 0, 77]),
    st.lists(st.sampled_from([-1, 0, 1, 5, 1 << 40]), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_no_graph_is_too_odd(nodes: list[onnx.NodeProto], kind: int, shape: list[int]) -> None:
    graph = model(nodes, [], [])
    graph.graph.initializer.add(name="x", data_type=kind, dims=shape, raw_data=b"123")
    odd = graph.graph.initializer.add(name="z", data_type=kind, dims=shape, data_location=1)
    odd.external_data.add(key="location", value="\0/../z")
    odd.external_data.add(key="offset", value="many")
    for version in ((10, 3), (11, 0)):
        assert all(f.reason and f.remedy for f in lint(graph, version))


# The command


def saved(graph: Graph, folder: Path) -> Path:
    path = folder / "g.onnx"
    path.write_bytes(graph.SerializeToString())
    return path


def test_portable_graphs_need_lowering(draft: tuple[Path, Path], capsys: Said) -> None:
    graph, layers = onnx.load(draft[0], load_external_data=False), 2
    # fp32 attention without the attribute, and two caches a layer of a length still open.
    kernel, length = ("attention-kernel", "refused"), ("cache-length", "refused")
    found = Counter((f.rule, f.severity) for f in lint(graph, (11, 0)))
    assert found == {kernel: layers, length: 2 * layers}
    findings = lint(graph, (10, 3))
    refused = Counter(f.reason.split()[0] for f in findings if f.severity == "refused")
    assert refused == {"Attention": layers, "TensorScatter": 2 * layers}
    assert [(f.rule, f.severity) for f in findings[-1:]] == [("opset", "dropped")]
    assert cli.run(["lint", str(draft[0])]) == 1
    out = capsys.readouterr().out
    assert "`specrt build` lowers it" in out
    assert len(out.splitlines()) < 10, "nodes that are alike share a line"


def test_a_fault_is_named_with_its_remedy(tmp_path: Path, capsys: Said) -> None:
    path = saved(attention(softcap=2.0), tmp_path)
    assert cli.run(["lint", str(path), "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert sorted(told) == ["node", "reason", "remedy", "rule", "severity"]
    assert (told["rule"], told["severity"]) == ("attention-softcap", "refused")
    graph = attention(softcap=2.0)
    graph.graph.node[0].name = "\x1b[2Jn\n"
    assert cli.run(["lint", str(saved(graph, tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2
    assert cli.run(["lint", str(saved(relu(), tmp_path))]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert cli.run(["lint", str(saved(attention(mask=T.BOOL), tmp_path))]) == 0
    assert capsys.readouterr().out.startswith("slow: n: ")
    assert cli.run(["lint", str(saved(scatter(), tmp_path)), "--tensorrt", "10.15.1.29"]) == 0
    assert cli.run(["lint", str(path), "--tensorrt", "10.13"]) == 1


def test_what_is_no_graph_is_refused(tmp_path: Path, capsys: Said) -> None:
    def refusal(*args: object) -> str:
        assert cli.run(["lint", *map(str, args)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    path = saved(relu(), tmp_path)
    for version in ("10.2", "11.0x"):
        assert "--tensorrt is" in refusal(path, f"--tensorrt={version}")
    whole = path.read_bytes()
    for content in (b"", b"not ONNX", whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert refusal(path).startswith(f"specrt: {path} is not an ONNX graph")
    with path.open("wb") as file:
        file.truncate(3 << 30)
    assert "external data" in refusal(path), "unread"
    assert "cannot be read" in refusal(tmp_path / "none.onnx")
    assert "is a folder" in refusal(tmp_path)
