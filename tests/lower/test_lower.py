"""Lowering makes engines of fused operators, and every engine equals its portable graph."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from export.zoo import MODELS, Exported, architectures
from lower.comparing import equal_on_cpu
from specrt.engine.ort import OrtEngine
from specrt.errors import BuildError
from specrt_export.compile import LoweredModel
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.lower import attention as rotary
from specrt_export.lower.attention import Rotary, tabulate
from specrt_export.lower.lazy_tensor import stored_weights
from specrt_export.lower.ort_lowering import OrtTarget, lower
from specrt_export.lower.view import Lowered
from specrt_export.portable.graph import geometry_of, read_graph, runs_here

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
MAX_LENGTH = 128
WIDTHS = [1, 2, 4, 9]


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for n in model.graph.node)


def lowered(graph: Path, folder: Path, max_length: int = MAX_LENGTH) -> Lowered:
    portable = read_graph(graph)
    weights = stored_weights(portable, folder)
    return lower(portable, weights, OrtTarget(geometry_of(portable), max_length))


@pytest.mark.parametrize(("role", "layers"), [("target", 8), ("draft", 2)])
def test_codelet_lowers_to_fused_operators(engines: Path, role: str, layers: int) -> None:
    folder = engines / "codelet"
    made = lowered(folder / "portable" / f"{role}.onnx", folder / "checkpoint" / role)
    norms, each = 2 * layers + 1, f"{layers}/{layers}"
    assert made.fused == {
        "linear": f"{7 * layers + 1}/{7 * layers + 1}",
        "rms_norm": f"{norms}/{norms}",
        "attention": each,
        "rotary": each,
        "qkv": each,
        "gate_up": each,
        "skip_norm": f"{norms - 1}/{norms - 1}",
        "quantized": "0/0",
    }
    assert operators(made.model) == {
        "FusedMatMul": 4 * layers + 1,
        "GroupQueryAttention": layers,
        "SkipSimplifiedLayerNormalization": norms - 1,
        "SimplifiedLayerNormalization": 1,
        **dict.fromkeys(("Split", "Sigmoid"), layers),
        "Mul": 2 * layers,
        "Gather": 2,
        # The two lengths of attention, and the argmax of a row of numbers.
        **dict.fromkeys(("Shape", "Add"), 1),
        **dict.fromkeys(("Cast", "Sub", "Squeeze"), 2),
        **dict.fromkeys(("TopK", "ReduceSum", "IsNaN", "Where"), 1),
    }
    stamps = {o.domain: o.version for o in made.model.opset_import}
    assert stamps[""] == 21
    assert made.model.ir_version == 10


def test_lowering_leaves_the_portable_graph_as_it_was(draft: tuple[Path, Path]) -> None:
    portable = read_graph(draft[0])
    before = portable.SerializeToString()
    lower(
        portable, stored_weights(portable, draft[1]), OrtTarget(geometry_of(portable), MAX_LENGTH)
    )
    assert portable.SerializeToString() == before


@pytest.fixture
def draft(engines: Path) -> tuple[Path, Path]:
    """The portable graph of codelet's draft, and its checkpoint."""
    folder = engines / "codelet"
    return folder / "portable" / "draft.onnx", folder / "checkpoint" / "draft"


def compare(graph: Path, checkpoint: Path, out: Path) -> tuple[LoweredModel, float]:
    """Compile a graph, and compare the engine with it at several widths."""
    compiled = compile_ort_cpu(graph, checkpoint, out, MAX_LENGTH)
    error = equal_on_cpu((graph, checkpoint), compiled, MAX_LENGTH, WIDTHS)
    return compiled, error


@needs_reference
def test_an_engine_equals_its_graph(draft: tuple[Path, Path], tmp_path: Path) -> None:
    compiled, error = compare(*draft, tmp_path)
    assert compiled.fused["attention"] == "2/2"
    assert error < 1e-5


@needs_reference
def test_swapped_rotation_tables_are_found(
    draft: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(model: onnx.ModelProto, rotary: Rotary, length: int) -> list[NDArray[np.float32]]:
        return tabulate(model, rotary, length)[::-1]

    monkeypatch.setattr(rotary, "tabulate", swapped)
    with pytest.raises(BuildError, match="differs from the portable graph"):
        compare(*draft, tmp_path)


@needs_reference
def test_an_engine_that_returns_no_numbers_is_found(
    draft: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = OrtEngine.forward

    def broken(self: OrtEngine, *arguments: object) -> object:
        made = forward(self, *arguments)  # type: ignore[arg-type]
        made.logits[...] = np.nan
        return made

    monkeypatch.setattr(OrtEngine, "forward", broken)
    with pytest.raises(BuildError, match="differs from the portable graph by nan"):
        compare(*draft, tmp_path)


def with_windows(graph: Path, windows: tuple[int, ...], copy: Path) -> Path:
    """Copy a portable graph whose metadata states other windows than its mask has."""
    model = read_graph(graph)
    geometry = geometry_of(model)
    stated = dataclasses.replace(geometry, windows=windows)
    for entry in model.metadata_props:
        if entry.key == "specrt.geometry":
            entry.value = json.dumps(stated.to_json())
    copy.write_bytes(model.SerializeToString())
    return copy


@needs_reference
def test_a_window_the_graph_does_not_have_is_found(
    draft: tuple[Path, Path], tmp_path: Path
) -> None:
    graph = with_windows(draft[0], (16, 0), tmp_path / "graph.onnx")
    with pytest.raises(BuildError, match="differs from the portable graph"):
        compare(graph, draft[1], tmp_path)


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

WIDE: dict[str, object] = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 16, in models of the zoo's width."""

# The zoo's heads of 8 are rotated outside attention: its kernel takes multiples of 16.
WIDER: dict[str, dict[str, object]] = {
    **dict.fromkeys(("llama3", "qwen2", "mistral", "phi3", "starcoder2"), WIDE),
    "llama2": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "smollm3": {**WIDE, "no_rope_layers": [1, 1]},
    "gpt_neox": {"num_attention_heads": 1, "rotary_pct": 0.5},
}


def fused(name: str, *, wide: bool) -> dict[str, str]:
    """Say what lowering should find in an architecture."""
    linear, norms, rotary, joined, gates, skips = FUSED[name]
    inside = rotary
    if not wide and name in WIDER:
        inside, joined = 0, 0
        if name == "smollm3":  # one of its layers does not rotate
            joined = 1
    counts = {
        "linear": (linear, linear),
        "rms_norm": (norms, norms),
        "attention": (2, 2),
        "rotary": (inside, rotary),
        "qkv": (joined, 2),
        "gate_up": (gates, gates),
        "skip_norm": (skips, skips),
        "quantized": (0, 0),
    }
    return {what: f"{n}/{of}" for what, (n, of) in counts.items()}


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("name", architectures(*FUSED))
def test_every_architecture_lowers_to_an_equal_engine(
    name: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    one = exported(name)
    compiled, error = compare(one.graph.path, one.checkpoint.folder, tmp_path)
    assert compiled.fused == fused(name, wide=False)
    assert error < 1e-5
    engine = onnx.load(tmp_path / "engine.onnx", load_external_data=False)
    found = operators(engine)
    assert found["GroupQueryAttention"] == 2
    assert not found.keys() & {"Attention", "TensorScatter", "Cos", "MatMul", "Gemm", "Transpose"}


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("name", architectures(*WIDER))
def test_wider_heads_rotate_inside_attention(
    name: str,
    exported: Callable[[str], Exported],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, changes, saving = MODELS[name]
    wider = {**changes, **WIDER[name]}
    monkeypatch.setitem(MODELS, f"{name}_wide", (config, wider, saving))
    one = exported(f"{name}_wide")
    compiled, error = compare(one.graph.path, one.checkpoint.folder, tmp_path)
    assert compiled.fused == fused(name, wide=True)
    assert error < 1e-5


@pytest.mark.export
def test_every_architecture_of_the_zoo_is_lowered(exported: Callable[[str], Exported]) -> None:
    assert set(FUSED) == set(MODELS)
