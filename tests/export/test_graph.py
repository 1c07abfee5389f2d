"""Portable graphs: their contract, and their parity with transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from specrt.errors import ExportError

pytest.importorskip("onnx_ir", reason="exporting needs more: make setup-export")

from export.zoo import MODELS, WINDOW, Exported

pytestmark = pytest.mark.export

Zoo = Callable[[str], Exported]

WINDOWS = {
    "qwen2": (0, WINDOW),
    "mistral": (WINDOW, WINDOW),
    "gemma2": (WINDOW, 0),
    "gemma3": (WINDOW, 0),
    "starcoder2": (WINDOW, WINDOW),
}


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_agrees_with_its_model(name: str, exported: Zoo) -> None:
    from specrt_export.check.equivalence import check_parity

    one = exported(name)
    report = check_parity(one.checkpoint, one.graph.path)
    windows = WINDOWS.get(name, (0, 0))
    assert one.graph.geometry.windows == windows
    beyond = [f"window {WINDOW}"] if any(windows) else []
    assert [case.name for case in report.cases] == ["prefill", "offset", "rollback", *beyond]
    assert report.error < 1e-5, report
    assert all(case.argmax_equal == case.rows for case in report.cases)
    assert report.unreached == ()


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_keeps_the_contract(name: str, exported: Zoo) -> None:
    one = exported(name)
    model = load(one.graph.path)
    kv = ["B", one.graph.geometry.kv_heads, "M", one.graph.geometry.head_dim]
    pairs = [f"{kind}.{i}" for i in range(2) for kind in ("key", "value")]
    assert shapes(model.graph.input) == {
        "input_ids": (7, ["B", "S"]),
        "start": (7, ["B"]),
        "rows": (7, ["R"]),
        **dict.fromkeys(pairs, (1, kv)),
    }
    assert shapes(model.graph.output) == {
        "logits": (1, ["B", "R", 160]),
        "argmax": (7, ["B", "R"]),
        **{f"present_{pair}": (1, kv) for pair in pairs},
    }
    assert model.ir_version == 11
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
    users = {pair: [n for n in model.graph.node if pair in n.input] for pair in pairs}
    for pair in pairs:
        writes = [n for n in users[pair] if n.op_type != "Shape"]
        assert [(n.op_type, n.input[2], n.output[0]) for n in writes] == [
            ("TensorScatter", "start", f"present_{pair}")
        ]


@pytest.mark.parametrize("name", MODELS)
def test_attention_gets_one_mask_for_each_window(name: str, exported: Zoo) -> None:
    one = exported(name)
    attentions = [n for n in load(one.graph.path).graph.node if n.op_type == "Attention"]
    assert len(attentions) == 2
    assert all(len(n.input) == 4 for n in attentions)
    assert not any(a.name == "is_causal" for n in attentions for a in n.attribute)
    assert len({n.input[3] for n in attentions}) == len(set(one.graph.geometry.windows))


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_the_checkpoints_own_bytes(name: str, exported: Zoo) -> None:
    one = exported(name)
    model = load(one.graph.path)
    stored = {(w.file.name, w.offset, w.bytes) for w in one.checkpoint.weights.values()}
    used = set()
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            used.add((place["location"], int(place["offset"]), int(place["length"])))
        else:
            assert len(tensor.raw_data) <= 1024, tensor.name
    assert used == stored
    assert one.graph.bytes < 60_000


def shapes(values: Iterable[onnx.ValueInfoProto]) -> dict[str, tuple[int, list[str | int]]]:
    found = {}
    for value in values:
        kind = value.type.tensor_type
        dims = [d.dim_param or d.dim_value for d in kind.shape.dim]
        found[value.name] = (kind.elem_type, dims)
    return found


def test_half_precision_is_cast_and_tied_weights_are_one(exported: Zoo) -> None:
    model = load(exported("llama3").graph.path)
    external = [t for t in model.graph.initializer if t.data_location == t.EXTERNAL]
    casts = {n.input[0]: n for n in model.graph.node if n.op_type == "Cast"}
    assert {t.data_type for t in external} == {onnx.TensorProto.BFLOAT16}
    assert all(casts[t.name].attribute[0].i == onnx.TensorProto.FLOAT for t in external)
    assert "lm_head.weight" not in {t.name for t in external}
    embedding = casts["model.embed_tokens.weight"].output[0]
    readers = [n.op_type for n in model.graph.node if embedding in n.input]
    assert readers == ["Gather", "Transpose"]


def test_the_shards_of_a_checkpoint_are_named(exported: Zoo) -> None:
    one = exported("qwen3")
    files = {weight.file.name for weight in one.checkpoint.weights.values()}
    assert len(files) > 1
    assert all(re.fullmatch(r"model-\d+-of-\d+\.safetensors", file) for file in files)


def test_names_follow_the_modules(exported: Zoo) -> None:
    names = [node.name for node in load(exported("llama3").graph.path).graph.node]
    assert len(set(names)) == len(names)
    assert "model.layers.1.self_attn.q_proj/MatMul" in names
    assert "model.layers.0.self_attn/Attention" in names


def test_two_exports_are_the_same_bytes(exported: Zoo, tmp_path: Path) -> None:
    from specrt_export.portable.exporter import export_graph

    one = exported("opt")
    stages: list[str] = []
    again = export_graph(one.checkpoint, tmp_path / "again.onnx", progress=stages.append)
    assert again.path.read_bytes() == one.graph.path.read_bytes()
    assert stages == ["trace", "tidy", "attach", "save"]
    assert [p.name for p in tmp_path.iterdir()] == ["again.onnx"]


def test_nothing_stays_registered(exported: Zoo) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    exported("opt")
    assert "specrt" not in ALL_ATTENTION_FUNCTIONS
    assert "specrt" not in ALL_MASK_ATTENTION_FUNCTIONS


def widen_window(model: onnx.ModelProto) -> None:
    """Let every query see all keys before it."""
    set_initializer(model, f"INT64({WINDOW})", np.array(1000, np.int64))


def unmask(model: onnx.ModelProto) -> None:
    """Hide nothing."""
    set_initializer(model, "FLOAT(-3.4028235e+38)", np.array(0, np.float32))


def bend_rope(model: onnx.ModelProto) -> None:
    """Turn a little too fast."""
    for tensor in model.graph.initializer:
        if tensor.name.endswith("inv_freq"):
            turned = numpy_helper.to_array(tensor) * np.float32(1.02)
            tensor.CopyFrom(numpy_helper.from_array(turned, tensor.name))


def drop_offset(model: onnx.ModelProto) -> None:
    """Count positions from the start of the pass."""
    node = next(n for n in model.graph.node if n.op_type == "Unsqueeze" and n.input[0] == "start")
    zero = onnx.helper.make_node("Sub", ["start", "start"], ["zero"])
    node.input[0] = "zero"
    model.graph.node.insert(0, zero)


def write_at_zero(model: onnx.ModelProto) -> None:
    """Write every pass over the first keys."""
    for node in model.graph.node:
        if node.op_type == "TensorScatter":
            del node.input[2:]


def set_initializer(model: onnx.ModelProto, name: str, value: np.ndarray) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(value, name))


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (widen_window, "prefill"),
        (unmask, "prefill"),
        (bend_rope, "prefill"),
        (drop_offset, "offset"),
        (write_at_zero, "offset"),
    ],
)
def test_parity_finds_a_broken_graph(
    fault: Callable[[onnx.ModelProto], None], case: str, exported: Zoo, tmp_path: Path
) -> None:
    from specrt_export.check.equivalence import check_parity

    one = exported("mistral")
    model = load(one.graph.path)
    fault(model)
    broken = tmp_path / "broken.onnx"
    onnx.save(model, broken)
    with pytest.raises(ExportError, match=f"disagrees with the model at '{case}'"):
        check_parity(one.checkpoint, broken)


def test_a_window_beyond_reach_is_said(exported: Zoo) -> None:
    from specrt_export.check.equivalence import check_parity

    one = exported("mistral")
    report = check_parity(one.checkpoint, one.graph.path, reach=WINDOW)
    assert report.unreached == (WINDOW,)
    assert [case.name for case in report.cases] == ["prefill", "offset", "rollback"]
