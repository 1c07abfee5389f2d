"""Plans of real models: what TensorRT made of them, layer by layer and kernel by kernel."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lower.plans import GAMMAS, OLD, Model, Planned, layers, make, parsed
from specrt.engine.tensorrt.library import Library
from specrt.errors import BuildError
from specrt_export.compile import tensorrt_compiler as plan
from specrt_export.lower import tensorrt_lowering as products
from specrt_export.lower import tensorrt_lowering as tensorrt
from specrt_export.lower.lazy_tensor import WEIGHTS
from specrt_export.portable.graph import runs_here
from specrt_export.precision import Precision

Plans = Callable[..., Planned]
Case = tuple[str, str, int]

# Model, precision, weights that share a scale; 0 is what a recipe without `block` gives.
# A scale for half of codelet's draft's rows: what has one for a whole row is written out first.
CODELET: list[Case] = [
    *(("target", precision, 0) for precision in ("fp16", "int8", "int4")),
    *(("draft", precision, 0) for precision in ("fp16", "int8", "fp8")),
    ("draft", "int4", 0),
]
# int4 in blocks smaller than the rows of these models, which are 32 and 64 wide.
ZOO_NAMES = ("llama3", "qwen3", "gemma3")
ZOO: list[Case] = [
    (name, precision, 16 * (precision == "int4"))
    for name in ZOO_NAMES
    for precision in ("fp16", "int8", "int4")
]
OLD_FORM: list[Case] = [("draft", "fp16", 0), ("draft", "int8", 0), ("draft", "int4", 0)]


def named(case: Case) -> str:
    return f"{case[0]}-{case[1]}"


def all_cases(cases: list[Case]) -> list[Any]:
    """Mark those that need an export."""
    return [
        pytest.param(case, id=named(case), marks=[pytest.mark.export] * (case[0] in ZOO_NAMES))
        for case in cases
    ]


native = pytest.mark.parametrize("case", all_cases(CODELET + ZOO))
old_form = pytest.mark.parametrize("case", all_cases(OLD_FORM))


def origin(network: Any, tensor: Any) -> str:
    """Return the name of what a tensor is a cast or a copy of."""
    makers = {
        layer.get_output(0).name: layer
        for layer in layers(network, "CAST") + layers(network, "IDENTITY")
    }
    while tensor.name in makers:
        tensor = makers[tensor.name].get_input(0)
    return str(tensor.name)


def caches(geometry: Any) -> list[str]:
    return sorted(f"{kind}.{at}" for at in range(geometry.layers) for kind in ("key", "value"))


@native
def test_caches_are_updated_where_they_lie(plans: Plans, rtx: Library, case: Case) -> None:
    """Two updates a layer, each straight from an input of the graph, at `start`."""
    made = plans(*case)
    with parsed(rtx, made.graph) as network:
        updates = layers(network, "KV_CACHE_UPDATE")
        assert all(update.get_input(0).is_network_input for update in updates)
        assert sorted(update.get_input(0).name for update in updates) == caches(made.geometry)
        assert {origin(network, update.get_input(2)) for update in updates} == {"start"}
        for update in updates:
            written = update.get_output(0)
            assert written.is_network_output
            assert written.name == f"present_{update.get_input(0).name}"
            assert tuple(written.shape) == tuple(update.get_input(0).shape)
    assert made.record.form == "native"


@native
def test_every_attention_has_the_mask_of_its_window(plans: Plans, rtx: Library, case: Case) -> None:
    made = plans(*case)
    with parsed(rtx, made.graph) as network:
        masks = [layer.get_input(3) for layer in layers(network, "ATTENTION_INPUT")]
        assert len(masks) == made.geometry.layers
        assert all(mask is not None for mask in masks)
        # The last axis is the whole buffer, and layers that see as far as each other share a mask.
        assert {tuple(mask.shape)[::3] for mask in masks} == {(1, 128)}
        seen = Counter(mask.name for mask in masks)
    windows = made.geometry.windows or (0,) * made.geometry.layers
    assert sorted(seen.values()) == sorted(Counter(windows).values())


@native
def test_profiles_are_those_of_the_role(
    plans: Plans, model: Callable[[str], Model], case: Case
) -> None:
    made = plans(*case)
    record = made.record
    verify = [(f"verify {gamma}", gamma + 1, gamma + 1) for gamma in GAMMAS]
    target = [("prefill", 32, max(GAMMAS) + 1), ("decode", 1, 1), *verify]
    draft = [("prefill", 32, 1), ("decode", 1, 1), ("catch-up", 2, 1)]
    expected = target if model(case[0]).role == "target" else draft
    assert [(p.name, p.width.most, p.rows.most) for p in record.profiles] == expected
    assert [one.profile for one in record.compiled] == [name for name, _, _ in expected]
    assert all(one.launches and one.activation_bytes for one in record.compiled)
    assert record.sha256 == hashlib.sha256(made.plan.read_bytes()).hexdigest()
    assert record.confidence is (expected is draft)
    assert record.candidates == 16
    assert record.messages == ()


@native
def test_attention_has_kernels_of_its_own(plans: Plans, case: Case) -> None:
    """One kernel a layer: of a vector where there is one token, else of a matrix.

    Fewer than 4 query heads have no kernel for a vector, and heads of 8 none for a matrix.
    """
    made = plans(*case)
    geometry = made.geometry
    one = "gemv" if geometry.heads >= 4 else "gemm"
    many = "gemm" if geometry.head_dim >= 16 else "none"
    for compiled in made.record.compiled:
        wanted = one if compiled.profile == "decode" else many
        assert compiled.attention == wanted, compiled.profile
        fused = [kernel for kernel in compiled.kernels if "_mha" in kernel.name]
        assert sum(kernel.count for kernel in fused) == geometry.layers * (wanted != "none")


@native
def test_no_kernel_only_writes_out_a_weight(plans: Plans, case: Case) -> None:
    """Where attention has a kernel; the int4 product behind one that is taken apart may need it."""
    made = plans(*case)
    for compiled in made.record.compiled:
        apart = case[1] == "int4" and compiled.attention == "none"
        assert compiled.dequantising <= apart * made.geometry.layers, compiled


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_no_weight_is_held_twice(plans: Plans, precision: str) -> None:
    """Whatever layouts the profiles want; the constants of TensorRT's own take the rest."""
    made = plans("target", precision)
    stored = made.graph.with_name(WEIGHTS).stat().st_size
    assert made.record.weight_bytes < 1.02 * stored


@old_form
def test_older_versions_get_new_buffers(plans: Plans, rtx: Library, case: Case) -> None:
    """In simpler operators: each cache is read once, as an input, by what writes it anew."""
    made = plans(*case, version=OLD)
    with parsed(rtx, made.graph) as network:
        assert not layers(network, "KV_CACHE_UPDATE") + layers(network, "ATTENTION_INPUT")
        written = {
            layer.get_input(0).name: layer.get_output(0).name
            for layer in layers(network, "SCATTER")
        }
        assert all(layer.get_input(0).is_network_input for layer in layers(network, "SCATTER"))
    assert written == {name: f"present_{name}" for name in caches(made.geometry)}
    record = made.record
    assert record.form == "decomposed"
    assert [one.attention for one in record.compiled] == ["none"] * 3
    assert [one.dequantising for one in record.compiled] == [0] * 3


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_plans_are_alike_from_build_to_build(
    plans: Plans, model: Callable[[str], Model], rtx: Library, tmp_path: Path, precision: str
) -> None:
    """All but names that the library orders by chance."""
    first = plans("draft", precision).record
    again = make(model("draft"), Precision.of(precision, per_row=True), tmp_path / "2", rtx).record
    assert again.compiled == first.compiled
    assert again.weight_bytes == first.weight_bytes
    assert again.plan_bytes == pytest.approx(first.plan_bytes, rel=1e-3)


class _Alone:
    """Products without a row more."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def of(self, name: str) -> str:
        return name

    def drop(self, made: str, name: str) -> None:
        self._view.add("Identity", [made], outputs=[name])


def test_without_a_row_more_decode_writes_weights_out(
    model: Callable[[str], Model], rtx: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the row is for; should this fail, later versions may not need it."""
    monkeypatch.setattr(products, "Partners", _Alone)
    made = make(model("draft"), Precision.of("int8", per_row=True), tmp_path / "made", rtx)
    found = {one.profile: one.dequantising for one in made.record.compiled}
    assert found["decode"] > found["catch-up"]


def test_few_heads_need_leave_to_be_taken_apart(
    model: Callable[[str], Model], rtx: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "mark_decomposable", lambda graph: None)
    precision = Precision.of("fp16")
    with pytest.raises(BuildError, match=r"2 query heads.* TRT_decomposable"):
        make(model("draft"), precision, tmp_path / "linted", rtx)
    monkeypatch.setattr(plan, "_check", lambda graph, version: None)
    with pytest.raises(BuildError, match="TensorRT"):
        make(model("draft"), precision, tmp_path / "built", rtx)
    assert not (tmp_path / "built" / "engine.plan").exists()


def test_a_mask_that_is_lost_is_found(
    model: Callable[[str], Model], rtx: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is left to be built, whoever sees it first."""

    def unmask(view: Any, compute: str) -> None:
        for node in view.nodes("Attention"):
            node.input[3] = ""

    monkeypatch.setattr(tensorrt, "_soften_masks", unmask)
    with pytest.raises(BuildError, match=r"differs from the portable graph|mask"):
        make(model("draft"), Precision.of("fp16"), tmp_path / "held", rtx)
    monkeypatch.setattr(plan, "runs_here", lambda: False)
    monkeypatch.setattr(plan, "_check", lambda graph, version: None)
    with pytest.raises(BuildError, match="mask"):
        make(model("draft"), Precision.of("fp16"), tmp_path / "parsed", rtx)


@pytest.mark.skipif(not runs_here(), reason="this ONNX Runtime cannot run portable graphs")
def test_a_graph_that_means_something_else_is_not_compiled(
    model: Callable[[str], Model], rtx: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(*given: Any) -> Any:
        made = tensorrt.lower_tensorrt(*given)
        for node in made.model.graph.node:
            for attribute in node.attribute:
                if (node.op_type, attribute.name) == ("Attention", "scale"):
                    attribute.f *= 1.5
        return made

    monkeypatch.setattr(plan, "lower_tensorrt", shifted)
    with pytest.raises(BuildError, match="differs from the portable graph"):
        make(model("draft"), Precision.of("fp16"), tmp_path / "made", rtx)
    assert not (tmp_path / "made" / "engine.plan").exists()
