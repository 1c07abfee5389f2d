"""Every lowering of every architecture means what its portable graph means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from lower.lowering import LOWERINGS, Case, Lowering, findings, lowered
from lower.test_half import stays_on_device
from portable.zoo import (
    EXPERTS,
    MEMORIES,
    MODELS,
    NEIGHBOURS,
    ODD,
    RECURRENT,
    WIDE,
    Exported,
    architectures,
    matrix,
)
from specrt.errors import BuildError
from specrt.geometry import ATTENTION, CONV, NEXT_BASE, SHARED
from specrt_export.lower.canonical import split_heads
from specrt_export.lower.lazy_tensor import (
    INLINE_BYTES,
    in_memory,
)
from specrt_export.lower.projections import SPECRT, find_projection, find_projections
from specrt_export.lower.view import GraphView
from specrt_export.portable.experts_function import EXPERTS as FUNCTIONS
from specrt_export.portable.graph import read_graph, runs_here
from support.kernels import without_kernels

pytestmark = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
ALL = [how for how in LOWERINGS if how == "cpu-rows" or not how.endswith("-rows")]

# Architecture: projections, RMS norms, rotated layers, joined q, k, v, and gates, norms after sums,
# as the CPU kernels take them.
FUSED = {
    "llama2": (15, 5, 2, 2, 2, 4),
    "llama3": (15, 5, 2, 2, 2, 4),
    "qwen2": (15, 5, 2, 2, 2, 4),
    "qwen3": (15, 9, 2, 0, 2, 4),
    "mistral": (15, 5, 2, 2, 2, 4),
    "phi3": (9, 5, 2, 2, 2, 4),
    "gemma2": (15, 9, 2, 2, 2, 4),
    "gemma3": (15, 13, 2, 0, 2, 4),
    "gpt2": (9, 0, 0, 2, 0, 5),
    "gpt_neox": (9, 0, 2, 2, 0, 2),
    "opt": (13, 0, 0, 2, 0, 5),
    "smollm3": (15, 5, 1, 2, 2, 4),
    "starcoder2": (13, 0, 2, 2, 0, 4),
}
"""Of 2 layers each; a norm between projection and rotation keeps q, k, v apart."""


OUTSIDE = ("qwen2-odd", "phi3-odd")
"""Their gates have functions that the CPU kernels lack."""


def fused(name: str) -> dict[str, str]:
    """Say what lowering for a CPU should find in an architecture."""
    base = name.partition("-")[0]
    linear, norms, rotary, joined, gates, skips = FUSED[base]
    turning = 2 if rotary else 0  # a layer of smollm3 does not rotate, but in its wide form
    inside = turning if name == "smollm3-wide" else rotary
    return {
        "linear": f"{linear}/{linear}",
        "rms_norm": f"{norms}/{norms}",
        "attention": "2/2",
        "rotary": f"{inside}/{turning}",
        "qkv": f"{joined}/2",
        "gate_up": f"{0 if name in OUTSIDE else gates}/{gates}",
        "skip_norm": f"{skips}/{skips}",
        "norm": f"5/{norms or 5}",  # not those of heads, nor after a product
        "quantized": "0/0",
    }


@pytest.fixture
def lower(exported: Callable[[str], Exported], tmp_path: Path) -> Callable[[str, str], Case]:
    return lambda name, how: lowered(*exported(name).source, tmp_path, LOWERINGS[how])


@pytest.mark.export
@pytest.mark.parametrize(
    ("name", "how"),
    matrix([*MODELS, *(f"{name}-wide" for name in WIDE)], ALL, ("cpu", "tensorrt")),
)
def test_every_architecture_means_the_same(
    lower: Callable[[str, str], Case], name: str, how: str
) -> None:
    if (name, how) == ("gemma2", "tensorrt-attention"):
        with pytest.raises(BuildError, match="kv_lengths needs attention layers"):
            lower(name, how)
        return
    case = lower(name, how)
    found = Counter(n.op_type for n in case.model.graph.node)
    assert case.error() <= LOWERINGS[how].error
    if how.startswith("cpu"):
        hold_kernels(case, name, how)
    if how.startswith("cuda"):
        assert stays_on_device(case.model)
    if how in ("tensorrt", "tensorrt-attention"):
        assert found["Attention"] == (0 if name == "gemma2" else 2), "it refuses soft caps"
        assert found["TensorScatter"] == 4
    if how == "tensorrt-old":
        assert not found.keys() & {"Attention", "TensorScatter", "RotaryEmbedding"}
        assert found["ScatterElements"] == 4
        assert case.model.opset_import[0].version == 20
    if how.startswith("tensorrt"):
        assert found.keys() <= {s.name for s in onnx.defs.get_all_schemas()}, "standard ones only"


@pytest.mark.export
@pytest.mark.parametrize("how", [how for how in ALL if how.startswith("cpu")])
@pytest.mark.parametrize("name", architectures(*NEIGHBOURS, *(f"{name}-odd" for name in ODD)))
def test_other_sizes_and_rotations_mean_the_same_on_a_cpu(
    lower: Callable[[str, str], Case], name: str, how: str
) -> None:
    case = lower(name, how)
    assert case.error() <= LOWERINGS[how].error
    if name not in NEIGHBOURS:
        hold_kernels(case, name, how)


@pytest.mark.export
@pytest.mark.parametrize(
    ("name", "how"), matrix([*MEMORIES], ["cpu", "cpu-rows", "cpu-int8"], ("cpu",))
)
def test_layers_that_remember_in_other_ways_run_on_a_cpu(
    lower: Callable[[str, str], Case], name: str, how: str
) -> None:
    case = lower(name, how)
    assert case.error() <= LOWERINGS[how].error
    found = Counter(n.op_type for n in case.model.graph.node if n.domain == SPECRT)
    kinds = Counter(memory.kind for memory in case.lowered.geometry.memories)
    assert found["Convolution"] == kinds[CONV]
    assert found["Attention"] == kinds[ATTENTION] + kinds[SHARED]
    shared = [n for n in case.model.graph.node if any(a.name == "shared" for a in n.attribute)]
    assert len(shared) == kinds[SHARED]
    assert all(len(n.output) == 1 for n in shared), "it writes nothing"
    assert not {n.op_type for n in case.model.graph.node} & {"Conv", "GatherND", "TensorScatter"}


@pytest.mark.export
@pytest.mark.parametrize(
    ("name", "how"), matrix([*EXPERTS], ["cpu", "cpu-rows", "cpu-int8", "cpu-int4"], ("cpu",))
)
def test_mixtures_of_experts_run_on_a_cpu(
    lower: Callable[[str, str], Case], name: str, how: str
) -> None:
    case = lower(name, how)
    assert case.error() <= LOWERINGS[how].error
    found = Counter(n.op_type for n in case.model.graph.node if n.domain == SPECRT)
    portable = read_graph(case.source.graph).graph.node
    assert found["Experts"] == sum(n.op_type in FUNCTIONS.values() for n in portable) > 0


@pytest.mark.export
@pytest.mark.parametrize("how", ["cuda-fp16", "tensorrt"])
def test_mixtures_of_experts_are_refused_elsewhere(
    lower: Callable[[str, str], Case], how: str
) -> None:
    with pytest.raises(BuildError, match=r"a mixture of experts, which .* does not run"):
        lower("granitemoe", how)
    with without_kernels(), pytest.raises(BuildError, match=r"kernels alone run; .* missing"):
        lower("granitemoe", "cpu")


@pytest.mark.export
@pytest.mark.parametrize(
    ("name", "how"),
    matrix(
        [name for name in MEMORIES if name not in RECURRENT],
        ["contrib", "cuda-fp16", "tensorrt", "tensorrt-old-rows"],
    )
    + matrix(RECURRENT, ["tensorrt-old", "tensorrt"]),
)
def test_layers_that_remember_in_other_ways_run_without_the_kernels(
    lower: Callable[[str, str], Case], name: str, how: str
) -> None:
    way = how.replace("contrib", "cpu")
    with without_kernels() if how == "contrib" else nullcontext():
        case = lower(name, way)
        assert case.error() <= LOWERINGS[way].error
    nodes, geometry = case.model.graph.node, case.lowered.geometry
    assert not {n.op_type for n in nodes} & {"Conv", "GatherND"}
    written = [output for n in nodes for output in n.output if output.startswith("present_")]
    assert sorted(written) == sorted(f"present_{name}" for name in geometry.buffers)
    assert stays_on_device(case.model) or how != "cuda-fp16"
    if how.startswith("tensorrt"):
        assert {n.op_type for n in nodes} <= {s.name for s in onnx.defs.get_all_schemas()}
        assert findings(case.lowered.folder, (10, 3) if "old" in how else (11, 0)) == []


def one_more(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "Less" and node.input[1] == NEXT_BASE:
            node.op_type = "LessOrEqual"


def one_less(graph: onnx.GraphProto) -> None:
    one = onnx.numpy_helper.from_array(np.array([1]), "one.less")
    graph.initializer.append(one)
    for node in graph.node:
        if node.op_type == "Less" and node.input[1] == NEXT_BASE:
            node.input[1] = "before"
    graph.node.insert(0, onnx.helper.make_node("Sub", [NEXT_BASE, one.name], ["before"]))


def decay_of_another(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "CumSum":
            node.attribute.append(onnx.helper.make_attribute("exclusive", 1))


def test_attention_that_only_reads_needs_a_newer_runtime(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.25.1")
    with pytest.raises(BuildError, match=r"onnxruntime 1\.25\.1 only new ones; install .* 1\.31"):
        lowered(*exported("gemma4").source, tmp_path, LOWERINGS["cuda-fp16"])


def hold_kernels(case: Case, name: str, how: str) -> None:
    """Hold a graph to what the CPU kernels should have taken over."""
    counts, nodes = case.lowered.fused, case.model.graph.node
    found = Counter(n.op_type for n in nodes if n.domain == SPECRT)
    quantized, of = counts["quantized"].split("/")
    assert quantized == of
    if "-int" not in how:
        assert counts == fused(name)
    assert (found["Attention"], found["MatMul"]) == (2, 9)
    assert found["Embedding"] >= 1
    left = """Attention Cos DequantizeLinear FusedMatMul Gemm GroupQueryAttention MatMul MatMulNBits
        RotaryEmbedding TensorScatter Transpose"""
    assert not {n.op_type for n in nodes if n.domain != SPECRT} & {*left.split()}


def test_query_key_and_value_that_lie_together_by_head_are_projections_of_their_own() -> None:
    """As in GPT-NeoX: the rows of a head are those of its query, of its key, of its value."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[1, S, 8] x) => (float[1, 2, S, 4] q, float[1, 2, S, 4] k, float[1, 2, S, 4] v)
        <int64[4] shape = {1, -1, 2, 12}> {
            across = Transpose <perm = [1, 0]> (w)
            y = MatMul (x, across)
            heads = Reshape (y, shape)
            turned = Transpose <perm = [0, 2, 1, 3]> (heads)
            q, k, v = Split <axis = 3, num_outputs = 3> (turned)
        }"""
    weight = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)
    view = GraphView(onnx.parser.parse_model(text), {"w": in_memory("w", weight)})
    find_projections(view)
    split_heads(view)
    assert not view.nodes("Split")
    for place, name in enumerate("qkv"):
        reshape = view.maker(view.maker(name, "Transpose").input[0], "Reshape")
        rows = find_projection(view, reshape.input[0]).matrix.values.rows(0, 8)
        assert np.array_equal(rows, weight.reshape(2, 3, 4, 8)[:, place].reshape(8, 8))


def test_late_positions_are_told_apart(draft: tuple[Path, Path], tmp_path: Path) -> None:
    """Angles are whole positions times frequencies, and fp16 keeps 11 bits of them."""
    half = Lowering("tensorrt", "fp16")
    assert 1e-5 < lowered(*draft, tmp_path, half, max_length=2048).error() < 2e-3


@pytest.mark.parametrize("how", ["cpu", "cpu-int4"])
def test_a_tied_table_is_stored_once(lower: Callable[[str, str], Case], how: str) -> None:
    case = lower("llama3", how)
    nodes = [n for n in case.model.graph.node if n.domain == SPECRT]
    table = next(n for n in nodes if n.op_type == "Embedding")
    head = next(n for n in reversed(nodes) if n.op_type == "MatMul")
    assert table.input[1:] == head.input[1 : len(table.input)]
    tensors = case.model.graph.initializer
    places = [{e.key: int(e.value) for e in t.external_data if e.key != "location"}
              for t in tensors if t.external_data]  # fmt: skip
    stored = sum({place["offset"]: place["length"] for place in places}.values())
    inside = (len(tensors) - len(places)) * INLINE_BYTES
    assert stored <= case.lowered.weight_bytes <= stored + inside, "bytes of a table count once"


@pytest.mark.parametrize(
    "how", ["cpu-rows", "cuda-fp16", "tensorrt-old-rows", "tensorrt-attention-rows"]
)
def test_buffers_may_be_as_short_as_the_widest_pass(
    draft: tuple[Path, Path], tmp_path: Path, how: str
) -> None:
    case = lowered(*draft, tmp_path, LOWERINGS[how], max_length=8, prefill=8)
    assert case.error([1, 5]) <= LOWERINGS[how].error
