"""What is lowered for TensorRT means what the portable graph means, in both forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from export.zoo import Exported, architectures
from lower.comparing import opened
from specrt.engine.tensorrt.library import DECOMPOSED, NATIVE
from specrt.errors import BuildError
from specrt_export.check.equivalence import check_engine
from specrt_export.compile import LoweredModel
from specrt_export.lint import lint
from specrt_export.lower import logits as peak
from specrt_export.lower import tensorrt_lowering as partner
from specrt_export.lower.lazy_tensor import ENGINE, stored_weights, write_engine
from specrt_export.lower.tensorrt_lowering import (
    TensorRtTarget,
    form_of,
    lower_tensorrt,
    mark_decomposable,
)
from specrt_export.lower.view import GraphView, Lowered
from specrt_export.portable.graph import GraphRun, geometry_of, read_graph, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize import quantize

pytestmark = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
MAX_LENGTH, WIDTHS = 128, [1, 2, 5]
FORMS = (NATIVE, DECOMPOSED)

Source = tuple[Path, Path]
"""A portable graph, and the folder of its weights."""


@pytest.fixture
def draft(engines: Path) -> Source:
    """Codelet's draft."""
    pair = engines / "codelet"
    return pair / "portable" / "draft.onnx", pair / "checkpoint" / "draft"


def lowered(source: Source, **said: Any) -> Lowered:
    graph = read_graph(source[0])
    target = TensorRtTarget(geometry_of(graph), MAX_LENGTH, candidates=64)
    return lower_tensorrt(graph, stored_weights(graph, source[1]), replace(target, **said))


def error(source: Source, folder: Path, made: Lowered, **said: Any) -> float:
    """Hold a lowered graph to the one it came from."""
    compute, batch = said.get("compute", "fp16"), said.get("batch", 1)
    length = said.get("max_length", MAX_LENGTH)
    folder.mkdir()
    write_engine(made.model, made.weights, folder)
    geometry = geometry_of(read_graph(source[0]))
    model = LoweredModel("target", folder, geometry, compute, "", {})
    with opened(model, length, batch) as engine:
        return check_engine(GraphRun(*source), engine, WIDTHS, compute, "tensorrt")


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.export
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", architectures())
def test_every_architecture_means_the_same(
    exported: Callable[[str], Exported], tmp_path: Path, name: str, form: str
) -> None:
    model = exported(name)
    source = model.graph.path, model.checkpoint.folder
    made = lowered(source, form=form, compute="fp32", confidence=True)
    found = operators(made.model)
    assert found.keys() <= {s.name for s in onnx.defs.get_all_schemas()}, "standard operators only"
    if form == NATIVE:
        capped = 2 if name == "gemma2" else 0
        assert found["Attention"] == 2 - capped
        assert found["TensorScatter"] == 4
    else:
        assert not found.keys() & {"Attention", "TensorScatter", "RotaryEmbedding"}
        assert found["ScatterElements"] == 4
        assert made.model.opset_import[0].version == 20
    assert error(source, tmp_path / "made", made, compute="fp32") < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_half_precision_stays_near(draft: Source, tmp_path: Path, form: str, compute: str) -> None:
    made = lowered(draft, form=form, compute=compute)
    found = error(draft, tmp_path / "made", made, compute=compute)
    # bf16 runs widened on a CPU: only what was stored narrower than the checkpoint's bf16 shows.
    assert {"fp16": 1e-5, "bf16": 0}[compute] < found < {"fp16": 2e-3, "bf16": 2e-2}[compute]


@pytest.mark.parametrize("form", FORMS)
def test_late_positions_are_told_apart(draft: Source, tmp_path: Path, form: str) -> None:
    """Angles are whole positions times frequencies, and fp16 keeps 11 bits of them."""
    made = lowered(draft, form=form, max_length=2048)
    assert error(draft, tmp_path / "made", made, max_length=2048) < 2e-3


def test_what_is_read_from_logits_is_checked(draft: Source, tmp_path: Path) -> None:
    sources = {"argmax": "ReduceMin", "confidence": "Softmax", "list of candidates": "TopK"}
    for said, op_type in sources.items():
        made = lowered(draft, compute="fp32", confidence=True)
        node = next(n for n in reversed(made.model.graph.node) if n.op_type == op_type)
        if op_type == "TopK":
            node.attribute.remove(next(a for a in node.attribute if a.name == "largest"))
            node.attribute.append(helper.make_attribute("largest", 0))
        else:
            node.op_type = {"ReduceMin": "ReduceMax", "Softmax": "LogSoftmax"}[op_type]
        with pytest.raises(BuildError, match=f"has a wrong {said} "):
            error(draft, tmp_path / op_type, made, compute="fp32")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_shared_scales(draft: Source, tmp_path: Path, form: str, name: str) -> None:
    stored = quantize(*draft, tmp_path / "stored", Precision.of(name, per_row=True))
    source = stored.graph, stored.folder
    made = lowered(source, form=form)
    assert made.fused["quantized"] == "9/9"
    assert error(source, tmp_path / "made", made) < 2e-3


def test_rows_of_a_batch_are_apart(draft: Source, tmp_path: Path) -> None:
    for form in FORMS:
        made = lowered(draft, form=form, batch=3, compute="fp32")
        assert error(draft, tmp_path / form, made, batch=3, compute="fp32") < 1e-5


def test_products_of_8_bits_have_a_row_more(draft: Source, tmp_path: Path) -> None:
    """The row is added to the tokens and behind attention, and taken away before it."""
    stored = quantize(*draft, tmp_path / "stored", Precision.of("int8", per_row=True))
    source = stored.graph, stored.folder
    layers, plain = 2, operators(lowered(draft).model)
    found = operators(lowered(source).model)
    assert found["Concat"] - plain["Concat"] == 1 + layers + 1, "tokens, attention, rows"
    assert found["Slice"] - plain["Slice"] == (1 + layers + 1) + (layers + 1), "attention, logits"


def test_a_partner_is_the_first_row_again() -> None:
    """Whatever the operators between: what partnered values hold, shown on a small graph."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"]),
        helper.make_node("Mul", ["x", "x"], ["square"]),
        helper.make_node("Add", ["square", "x"], ["sum"]),
        helper.make_node("Softmax", ["sum"], ["mixed"], axis=1),
        helper.make_node("Gather", ["mixed", "rows"], ["y"], axis=1),
    ]
    ints, floats = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    table = np.arange(20, dtype=np.float32).reshape(10, 2) / 7
    graph = helper.make_graph(
        nodes, "partners",
        [helper.make_tensor_value_info("input_ids", ints, [1, "S"]),
         helper.make_tensor_value_info("rows", ints, ["R"])],
        [helper.make_tensor_value_info("y", floats, [1, "R", 2])],
        [onnx.numpy_helper.from_array(table, "table")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21)]
    view = GraphView(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    made = partner.PadRows(view)
    names = {name: made.of(name) for name in ("sum", "mixed", "y")}
    for name in names.values():
        view.add_output(helper.make_tensor_value_info(name, floats, None))
    session = ort.InferenceSession(
        view.tidy().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    tokens, rows = np.array([[4, 1, 7]]), np.array([2, 0])
    found = session.run(list(names.values()), {"input_ids": tokens, "rows": rows})
    x = table[[4, 1, 7]]
    total = x * x + x
    mixed = np.exp(total) / np.exp(total).sum(0)
    for one, wanted in zip(found, (total, mixed, mixed[rows]), strict=True):
        np.testing.assert_allclose(one[0], np.concatenate([wanted, wanted[:1]]), rtol=1e-5)


def test_no_scale_is_zero_in_fp16(draft: Source, tmp_path: Path) -> None:
    """Rows of tiny weights have scales that fp16 rounds to 0, and TensorRT refuses those."""
    for precision in (Precision.of("int8", per_row=True), Precision.of("int4", per_row=True)):
        place = tmp_path / precision.layers
        stored = quantize(*draft, place, precision)
        shrink_scales(stored.folder, stored.graph)
        made = lowered((stored.graph, stored.folder))
        nodes = [n for n in made.model.graph.node if n.op_type == "DequantizeLinear"]
        assert nodes
        for node in nodes:
            scales = made.weights[node.input[1]].load()
            assert scales.dtype == np.float16
            assert (scales != 0).all()


def shrink_scales(folder: Path, graph: Path) -> None:
    """Make every scale of a quantized graph a millionth of a millionth."""
    for tensor in read_graph(graph).graph.initializer:
        if tensor.name.endswith(".scale"):
            place = {entry.key: entry.value for entry in tensor.external_data}
            path, offset = folder / place["location"], int(place["offset"])
            values = np.memmap(path, np.float32, "r+", offset, int(np.prod(tensor.dims)))
            values *= 1e-12
            values.flush()


def test_scales_of_int4_are_positive(draft: Source, tmp_path: Path) -> None:
    """TensorRT's parser refuses others; the lint says so of a graph quantized for a CPU."""
    for per_row, expected in ((True, False), (False, True)):
        precision = Precision.of("int4", per_row=per_row)
        stored = quantize(*draft, tmp_path / f"stored {per_row}", precision)
        made = lowered((stored.graph, stored.folder))
        folder = tmp_path / f"made {per_row}"
        folder.mkdir()
        write_engine(made.model, made.weights, folder)
        rules = {finding.rule for finding in lint(made.model, (11, 0), folder)}
        assert ("quantized-scales" in rules) == expected


def test_what_is_no_token_is_looked_up_as_the_first(draft: Source, tmp_path: Path) -> None:
    made = lowered(draft, compute="fp32")
    write_engine(made.model, made.weights, tmp_path)
    geometry = geometry_of(read_graph(draft[0]))
    with opened(LoweredModel("target", tmp_path, geometry, "fp32", "", {}), MAX_LENGTH) as engine:
        none = engine.forward([[5, -1, 7]], 0).logits.copy()
        first = engine.forward([[5, 0, 7]], 0).logits.copy()
        last = engine.forward([[5, geometry.vocab_size - 1, 7]], 0).logits
        np.testing.assert_array_equal(none, first)
        assert not np.array_equal(none, last)


def scored(logits: list[list[float]], count: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return what is read from rows of logits."""
    array = np.array([logits], np.float32)
    value = helper.make_tensor_value_info("given", onnx.TensorProto.FLOAT, array.shape)
    outputs = [
        helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, array.shape),
        helper.make_tensor_value_info("argmax", onnx.TensorProto.INT64, array.shape[:2]),
    ]
    nodes = [
        helper.make_node("Identity", ["given"], ["logits"]),
        helper.make_node("ArgMax", ["logits"], ["argmax"], axis=-1, keepdims=0),
    ]
    graph = helper.make_graph(nodes, "scores", [value], outputs)
    opsets = [helper.make_opsetid("", 21)]
    view = GraphView(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    peak.add_argmax(view, array.shape[-1])
    if count:
        peak.cut_candidates(view, count)
    session = ort.InferenceSession(
        view.tidy().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"given": array}), strict=True))


def test_the_first_of_the_largest_is_found() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [
        [0.0, 3.0, 3.0, 1.0], [-inf, -1.0, -2.0, -1.0], [nan, 1.0, 2.0, 3.0], [1.0, inf, 0.0, 0.0],
        [-inf, -inf, -inf, -inf], [1.0, -inf, 0.5, -inf],
    ]  # fmt: skip
    assert scored(rows)["argmax"].tolist() == [[1, 1, -1, -1, -1, 0]]


def test_candidates_are_the_best_scores_falling() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, 40)).astype(np.float32)
    found = scored(rows.tolist(), 8)
    order = np.argsort(-rows, axis=-1, kind="stable")[:, :8]
    np.testing.assert_array_equal(found["candidates.ids"][0], order)
    np.testing.assert_array_equal(
        found["candidates.values"][0], np.take_along_axis(rows, order, axis=-1)
    )


def test_only_attention_is_marked(draft: Source) -> None:
    model = lowered(draft).model
    mark_decomposable(model)
    marked = [n.op_type for n in model.graph.node for a in n.attribute if a.name[:3] == "TRT"]
    assert marked == ["Attention"] * 2


def test_the_form_follows_the_version() -> None:
    assert form_of((10, 14, 9)) == form_of((10, 3)) == DECOMPOSED
    assert form_of((10, 15)) == form_of((11, 4, 0, 106)) == NATIVE


def test_masks_hold_the_lowest_number(draft: Source) -> None:
    for compute, lowest in (("fp16", -65504.0), ("bf16", -3.3895314e38)):
        made = lowered(draft, compute=compute)
        held = [made.weights.get(n.input[2]) for n in made.model.graph.node if n.op_type == "Where"]
        found = [w.load() for w in held if w is not None and w.shape == ()]
        values = [
            (np.asarray(w, np.uint32) << 16).view(np.float32) if compute == "bf16" else w
            for w in found
        ]
        assert any(float(v.reshape(())) == pytest.approx(lowest, rel=1e-6) for v in values)


def test_what_differs_is_refused(draft: Source, tmp_path: Path) -> None:
    made = lowered(draft, compute="fp32")
    for node in made.model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Attention" and attribute.name == "scale":
                attribute.f *= 1.3
    with pytest.raises(BuildError, match="differs from the portable graph"):
        error(draft, tmp_path / "made", made, compute="fp32")
    assert (tmp_path / "made" / ENGINE).is_file()


def test_a_graph_that_does_not_run_is_told_in_one_line(draft: Source, tmp_path: Path) -> None:
    made = lowered(draft, compute="fp32")
    cut = next(n for n in made.model.graph.node if n.op_type == "Split")
    cut.op_type = "Splitt"
    with pytest.raises(BuildError, match="does not run the lowered graph") as refused:
        error(draft, tmp_path / "unknown", made, compute="fp32")
    assert "\n" not in str(refused.value)
    made = lowered(draft, compute="fp32")
    product = next(n for n in made.model.graph.node if n.op_type == "MatMul")
    del product.input[:]
    product.input.extend(["input_ids", "input_ids"])
    with pytest.raises(BuildError, match="defect of the lowering"):
        error(draft, tmp_path / "wrong", made, compute="fp32")
