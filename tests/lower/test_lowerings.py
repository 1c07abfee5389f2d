"""Every lowering of every architecture means what its portable graph means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from lower.lowering import OLD, Case, Lowering, lowered
from lower.test_half import stays_on_device
from portable.zoo import MODELS, WIDE, Exported, architectures
from specrt_export.check.equivalence import TOLERANCES
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS
from specrt_export.portable.external_data import ALIGNMENT
from specrt_export.portable.graph import runs_here

pytestmark = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
LOWERINGS = {
    "cpu": Lowering("ort-cpu"),
    "cpu-int8": Lowering("ort-cpu", "int8"),
    "cpu-int4": Lowering("ort-cpu", "int4"),
    "cpu-rows": Lowering("ort-cpu", batch=3),
    "cuda-fp16": Lowering("ort-cuda", "fp16", error=TOLERANCES["fp16"]),
    "cuda-bf16": Lowering("ort-cuda", "bf16", error=TOLERANCES["bf16"]),
    "tensorrt": Lowering("tensorrt"),
    "tensorrt-old": Lowering("tensorrt", version=OLD),
    "tensorrt-rows": Lowering("tensorrt", batch=3),
    "tensorrt-old-rows": Lowering("tensorrt", batch=3, version=OLD),
}
"""The last two are for codelet's draft: rows are apart whatever the architecture."""
ALL = [how for how in LOWERINGS if how == "cpu-rows" or not how.endswith("-rows")]

# Architecture: projections, RMS norms, rotated layers, joined q, k, v, and gates, norms after sums.
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
    "smollm3": (15, 5, 2, 2, 2, 4),
    "starcoder2": (13, 0, 2, 2, 0, 4),
}
"""Of 2 layers each; a norm between projection and rotation keeps q, k, v apart."""


def fused(name: str) -> dict[str, str]:
    """Say what lowering for a CPU should find in an architecture."""
    base = name.removesuffix("-wide")
    linear, norms, rotary, joined, gates, skips = FUSED[base]
    inside = rotary
    if base == name and name in WIDE:  # one layer of smollm3 does not rotate
        inside, joined = 0, int(name == "smollm3")
    return {
        "linear": f"{linear}/{linear}",
        "rms_norm": f"{norms}/{norms}",
        "attention": "2/2",
        "rotary": f"{inside}/{rotary}",
        "qkv": f"{joined}/2",
        "gate_up": f"{gates}/{gates}",
        "skip_norm": f"{skips}/{skips}",
        "quantized": "0/0",
    }


def operators(case: Case) -> Counter[str]:
    return Counter(node.op_type for node in case.model.graph.node)


@pytest.fixture
def lower(exported: Callable[[str], Exported], tmp_path: Path) -> Callable[[str, str], Case]:
    def make(name: str, how: str) -> Case:
        one = exported(name)
        return lowered(*one.source, tmp_path, LOWERINGS[how])

    return make


@pytest.mark.export
@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("name", architectures(*MODELS, *(f"{name}-wide" for name in WIDE)))
def test_every_architecture_means_the_same(
    lower: Callable[[str, str], Case], name: str, how: str
) -> None:
    case = lower(name, how)
    found, counts = operators(case), case.lowered.fused
    assert case.error() <= LOWERINGS[how].error
    if how == "cpu":
        assert counts == fused(name)
    if how.startswith("cuda"):
        assert stays_on_device(case.model)
    if how.startswith("cpu-int"):
        assert found["MatMulNBits"] == 9
        assert found["GatherBlockQuantized"] >= 1
        assert not found.keys() & {"FusedMatMul", "DequantizeLinear"}
        assert len(set(counts["quantized"].split("/"))) == 1
    if how == "cpu-rows":
        assert counts == {**fused(name), "packed": "2/2"}
    if how.startswith("cpu"):
        assert found["GroupQueryAttention"] == 2 * LOWERINGS[how].batch
        left = {"Attention", "TensorScatter", "Cos", "MatMul", "Gemm", "Transpose"}
        assert not found.keys() & left
    if how == "tensorrt":
        assert found["Attention"] == (0 if name == "gemma2" else 2), "it refuses soft caps"
        assert found["TensorScatter"] == 4
    if how == "tensorrt-old":
        assert not found.keys() & {"Attention", "TensorScatter", "RotaryEmbedding"}
        assert found["ScatterElements"] == 4
        assert case.model.opset_import[0].version == 20
    if how.startswith("tensorrt"):
        assert found.keys() <= {s.name for s in onnx.defs.get_all_schemas()}, "standard ones only"


def test_codelet_lowers_to_fused_operators(draft: tuple[Path, Path], tmp_path: Path) -> None:
    layers, before = 2, draft[0].read_bytes()
    case = lowered(*draft, tmp_path, LOWERINGS["cpu"], "target")
    assert all(len(set(ratio.split("/"))) == 1 for ratio in case.lowered.fused.values())
    assert operators(case) == {
        "FusedMatMul": 4 * layers + 1,
        "GroupQueryAttention": layers,
        "SkipSimplifiedLayerNormalization": 2 * layers,
        "SimplifiedLayerNormalization": 1,
        **dict.fromkeys(("Split", "QuickGelu", "Mul"), layers),
        "Gather": 2,
        # The two lengths of attention, and the argmax of a row of numbers.
        **dict.fromkeys(("Shape", "Add", "Cast"), 1),
        **dict.fromkeys(("Sub", "Squeeze"), 2),
        **dict.fromkeys(("TopK", "ReduceSum", "IsNaN", "Where"), 1),
    }
    assert (case.model.opset_import[0].version, case.model.ir_version) == (21, 10)
    assert draft[0].read_bytes() == before


@pytest.mark.parametrize("how", ["tensorrt", "tensorrt-old"])
def test_late_positions_are_told_apart(draft: tuple[Path, Path], tmp_path: Path, how: str) -> None:
    """Angles are whole positions times frequencies, and fp16 keeps 11 bits of them."""
    half = Lowering("tensorrt", "fp16", version=LOWERINGS[how].version)
    assert 1e-5 < lowered(*draft, tmp_path, half, max_length=2048).error() < 2e-3


@pytest.mark.parametrize("how", ["cpu-int8", "cpu-int4"])
def test_a_tied_table_of_codes_is_stored_once(lower: Callable[[str, str], Case], how: str) -> None:
    case = lower("llama3", how)
    nodes = case.model.graph.node
    table = next(n for n in nodes if n.op_type == "GatherBlockQuantized")
    head = next(n for n in reversed(nodes) if n.op_type == "MatMulNBits")
    places = {t.name: tuple(e.value for e in t.external_data) for t in case.model.graph.initializer}
    assert table.input[0] != head.input[1]
    assert places[table.input[0]] == places[head.input[1]]
    assert table.input[2] == head.input[2]


@pytest.mark.export
@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("name", architectures("gpt2", "phi3"))
def test_slices_of_weights_do_not_show(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, how: str,
) -> None:  # fmt: skip
    """Weights are transposed, joined, narrowed and written a few rows at a time."""
    one, made = exported(name), []
    for size in (1 << 24, 300):
        monkeypatch.setattr("specrt_export.lower.lazy_tensor.SLICE_BYTES", size)
        out = tmp_path / str(size)
        made.append(lowered(*one.source, out, LOWERINGS[how]).lowered)
    for file in (ENGINE, WEIGHTS):
        whole, sliced = ((case.folder / file).read_bytes() for case in made)
        assert whole == sliced
    tensors = onnx.load(made[0].folder / ENGINE, load_external_data=False).graph.initializer
    entries = [entry for tensor in tensors for entry in tensor.external_data]
    places = [int(entry.value) for entry in entries if entry.key == "offset"]
    assert all(place % ALIGNMENT == 0 for place in places), "each from a page of its own"


@pytest.mark.parametrize("how", LOWERINGS)
def test_buffers_may_be_as_short_as_the_widest_pass(
    draft: tuple[Path, Path], tmp_path: Path, how: str
) -> None:
    case = lowered(*draft, tmp_path, LOWERINGS[how], max_length=8, prefill=8)
    assert case.error([1, 5]) <= LOWERINGS[how].error
