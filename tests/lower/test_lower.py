"""Lowering makes engines of fused operators, and every engine equals its portable graph."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from specrt.bundle import Bundle
from specrt.engines.ort import OrtEngine
from specrt.errors import BuildError
from specrt_export.compile.ort_cpu import CompiledModel, compile_ort_cpu, lower
from specrt_export.equal import check_equal
from specrt_export.lower import attention
from specrt_export.lower.rotary import Rotary, tabulate
from specrt_export.portable import geometry_of, read_graph, runs_here

if TYPE_CHECKING:
    from export.zoo import Exported

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
MAX_LENGTH = 128
WIDTHS = [1, 2, 4, 9]


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for n in model.graph.node)


@pytest.mark.parametrize(("role", "layers"), [("target", 8), ("draft", 2)])
def test_codelet_lowers_to_fused_operators(engines: Path, role: str, layers: int) -> None:
    portable = read_graph(engines / "codelet" / "portable" / f"{role}.onnx")
    geometry = geometry_of(portable)
    before = portable.SerializeToString()
    model, fused = lower(portable, geometry, 2048)
    assert portable.SerializeToString() == before
    assert fused == {
        "attention": f"{layers}/{layers}",
        "rotary": f"{layers}/{layers}",
        "rms_norm": f"{2 * layers + 1}/{2 * layers + 1}",
    }
    found = operators(model)
    assert found["GroupQueryAttention"] == layers
    assert found["SimplifiedLayerNormalization"] == 2 * layers + 1
    assert not found.keys() & {"Attention", "TensorScatter", "Reciprocal", "GatherND"}
    stamps = {o.domain: o.version for o in model.opset_import}
    assert stamps[""] == 21
    assert model.ir_version == 10


@pytest.mark.parametrize(("role", "layers"), [("target", 8), ("draft", 2)])
def test_codelets_engines_hold_nothing_newer_than_opset_21(
    codelet: Path, role: str, layers: int
) -> None:
    manifest = Bundle.open(codelet).manifest
    record = getattr(manifest, role)
    engine = onnx.load(codelet / record.engine, load_external_data=False)
    found = operators(engine)
    assert found["GroupQueryAttention"] == layers
    assert not found.keys() & {"Attention", "TensorScatter"}
    assert {o.domain: o.version for o in engine.opset_import}[""] <= 21
    attended = next(n for n in engine.graph.node if n.op_type == "GroupQueryAttention")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in attended.attribute}
    assert attributes["do_rotary"] == 1
    assert attributes["local_window_size"] == -1


@pytest.fixture
def draft(engines: Path) -> tuple[Path, Path]:
    """The portable graph of codelet's draft, and its checkpoint."""
    folder = engines / "codelet"
    return folder / "portable" / "draft.onnx", folder / "checkpoint" / "draft"


def hold_equal(graph: Path, checkpoint: Path, out: Path) -> tuple[CompiledModel, float | None]:
    """Compile a graph, and compare the engine with it at several widths."""
    compiled = compile_ort_cpu(graph, checkpoint, out, MAX_LENGTH)
    error = check_equal(graph, checkpoint, out, compiled.geometry, MAX_LENGTH, WIDTHS)
    return compiled, error


@needs_reference
def test_an_engine_equals_its_graph(draft: tuple[Path, Path], tmp_path: Path) -> None:
    compiled, error = hold_equal(*draft, tmp_path)
    assert compiled.fused["attention"] == "2/2"
    assert error is not None
    assert error < 1e-5


@needs_reference
def test_swapped_rotation_tables_are_found(
    draft: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(model: onnx.ModelProto, rotary: Rotary, length: int) -> list[NDArray[np.float32]]:
        return tabulate(model, rotary, length)[::-1]

    monkeypatch.setattr(attention, "tabulate", swapped)
    with pytest.raises(BuildError, match="differs from the portable graph"):
        hold_equal(*draft, tmp_path)


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
        hold_equal(*draft, tmp_path)


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
        hold_equal(graph, draft[1], tmp_path)


# Architecture: how many of its layers rotate inside attention, and how many norms are RMS norms.
FUSED = {
    "llama2": ("0/2", "5/5"),
    "llama3": ("0/2", "5/5"),
    "qwen2": ("0/2", "5/5"),
    "qwen3": ("2/2", "9/9"),
    "mistral": ("0/2", "5/5"),
    "phi3": ("0/2", "5/5"),
    "gemma2": ("2/2", "9/9"),
    "gemma3": ("2/2", "13/13"),
    "gpt2": ("0/0", "0/0"),
    "gpt_neox": ("0/2", "0/0"),
    "opt": ("0/0", "0/0"),
    "smollm3": ("0/2", "5/5"),
    "starcoder2": ("0/2", "0/0"),
}
"""The zoo's heads are of 8 unless it says 16; ONNX Runtime rotates only multiples of 16 itself."""


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("name", FUSED)
def test_every_architecture_lowers_to_an_equal_engine(
    name: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    one = exported(name)
    compiled, error = hold_equal(one.graph.path, one.checkpoint.folder, tmp_path)
    rotary, norms = FUSED[name]
    assert compiled.fused == {"attention": "2/2", "rotary": rotary, "rms_norm": norms}
    assert error is not None
    assert error < 1e-5
    engine = onnx.load(tmp_path / "engine.onnx", load_external_data=False)
    found = operators(engine)
    assert found["GroupQueryAttention"] == 2
    assert not found.keys() & {"Attention", "TensorScatter"}


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("name", ["mistral", "llama3"])
def test_wider_heads_rotate_inside_attention(
    name: str,
    exported: Callable[[str], Exported],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from export.zoo import MODELS

    config, changes, saving = MODELS[name]
    monkeypatch.setitem(MODELS, f"{name}_wide", (config, {**changes, "head_dim": 16}, saving))
    one = exported(f"{name}_wide")
    compiled, error = hold_equal(one.graph.path, one.checkpoint.folder, tmp_path)
    assert compiled.fused["rotary"] == "2/2"
    assert error is not None
    assert error < 1e-5


@pytest.mark.export
def test_every_architecture_of_the_zoo_is_lowered(exported: Callable[[str], Exported]) -> None:
    from export.zoo import MODELS

    assert set(FUSED) == set(MODELS)


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_found(
    off: int, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    one = exported("mistral")
    windows = tuple(w + off for w in one.graph.geometry.windows)
    graph = with_windows(one.graph.path, windows, tmp_path / "graph.onnx")
    with pytest.raises(BuildError, match="differs from the portable graph"):
        hold_equal(graph, one.checkpoint.folder, tmp_path)
