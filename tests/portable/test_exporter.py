"""Portable graphs: their contract, their weights, and their parity with transformers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from portable.zoo import (
    BARE,
    EXPERTS,
    MEMORIES,
    MODELS,
    RECORDED,
    WINDOW,
    Exported,
    InDoubles,
    architectures,
)
from shared import nightly_but
from specrt.cli.export import command
from specrt.errors import CheckpointError, ExportError
from specrt.geometry import BASE, FACTORS, STATE, is_ring
from specrt_export.check import equivalence
from specrt_export.check.equivalence import Reference, check_parity
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.safetensors_file import map_array
from specrt_export.portable.attachment import attach_graph, check_weights
from specrt_export.portable.experts_function import EXPERTS as GATED
from specrt_export.portable.exporter import export_graph, exporter
from specrt_export.portable.external_data import external_tensors
from specrt_export.portable.graph import GraphRun, facts_of
from specrt_export.portable.state_function import RECURRENCE
from support.builds import once
from support.quantized_folders import container

pytestmark = pytest.mark.export

Zoo = Callable[[str], Exported]

WINDOWS = {
    "gemma4": (WINDOW, 0, 0, 0),
    "gemma4_unified": (WINDOW, 0, WINDOW, 0),
    "lfm2": (3, 0, 3),
    "lfm3": (7, 0, WINDOW, 7),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_next", "olmo_hybrid", "qwen3_5_moe", "qwen3_next_moe"),
        (4, 0, 4, 0, 4, 0, 0),
    ),
    "lfm2_moe": (3, 0, 3),
    "gemma4_moe": (WINDOW, 0, WINDOW, 0),
    "nemotron_h": (4, 0, 0, 4, 0),
    "falcon_h1": (4, 0, 0, 4, 0, 0),
    "mamba2": (4, 0, 4, 0),
    **dict.fromkeys(("granitemoehybrid", "granitemoehybrid_moe", "bamba"), (4, 0, 0)),
    "qwen2": (0, WINDOW),
    "mistral": (WINDOW, WINDOW),
    "gemma2": (WINDOW, 0),
    "gemma3": (WINDOW, 0),
    "starcoder2": (WINDOW, WINDOW),
}


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def shapes(values: Iterable[onnx.ValueInfoProto]) -> dict[str, tuple[int, list[str | int]]]:
    kinds = ((value.name, value.type.tensor_type) for value in values)
    return {n: (k.elem_type, [d.dim_param or d.dim_value for d in k.shape.dim]) for n, k in kinds}


@pytest.mark.parametrize("name", architectures(*MODELS, *MEMORIES, *EXPERTS))
def test_a_graph_agrees_with_its_model(name: str, exported: Zoo) -> None:
    one = exported(name)
    report = check_parity(one.checkpoint, one.graph)
    assert check_weights(one.graph, one.checkpoint) == one.geometry
    windows = WINDOWS.get(name, (0, 0))
    assert tuple(memory.window for memory in one.geometry.memories) == windows
    beyond = [f"window {WINDOW}"] if WINDOW in windows else []
    assert [case.name for case in report.cases] == ["prefill", "offset", "rollback", *beyond]
    if report.error >= 2e-6:
        ours, eager = distances(one)
        assert ours < 1.25 * eager, (report, ours, eager)
    assert all(case.argmax_equal == case.rows for case in report.cases)
    assert report.unreached == ()


def distances(one: Exported) -> tuple[float, float]:
    """Return how far graph and eager model are from float64: RMS, as a part of the largest logit.

    Where eager's own rounding exceeds 2e-6, nearness to it says nothing: Gemma 4 scales no scores,
    and normed queries and keys of 32 numbers make some of up to 32, which round coarsely. There
    the graph may be no further from float64 than eager is: 6.2e-7 and 6.6e-7, at most 1.4e-5 both.
    """
    tokens = np.random.default_rng(0).integers(0, one.geometry.vocab_size, (4, 64))
    run, reference = GraphRun(one.graph, one.checkpoint.folder), Reference(one.checkpoint)
    run.reset(*tokens.shape)
    found = [run(tokens, [0] * 4, range(64))[0], reference(tokens)]
    with InDoubles():
        reference.model.double()
        reference.model.config._experts_implementation = "eager"  # the other one has no doubles
        right = reference(tokens)
    assert right.dtype == np.float64
    ours, eager = (float(np.sqrt(np.mean((each - right) ** 2))) for each in found)
    return ours / float(np.abs(right).max()), eager / float(np.abs(right).max())


@pytest.mark.parametrize("name", architectures(*MODELS, *MEMORIES, *EXPERTS))
def test_a_graph_keeps_the_contract(name: str, exported: Zoo) -> None:
    one = exported(name)
    model = load(one.graph)
    buffers = {
        name: (1, ["B", each.heads, each.fixed or ("P" if is_ring(name) else "M"), each.width])
        for name, each in one.geometry.buffers.items()
    }
    recurs = one.geometry.recurs
    assert shapes(model.graph.input) == {
        "input_ids": (7, ["B", "S"]),
        "start": (7, ["B"]),
        "rows": (7, ["R"]),
        **buffers,
        **({BASE: (7, ["B"])} if recurs else {}),
    }
    assert shapes(model.graph.output) == {
        "logits": (1, ["B", "R", 160]),
        "argmax": (7, ["B", "R"]),
        **{f"present_{name}": shape for name, shape in buffers.items()},
    }
    assert model.ir_version == 11
    functions = [RECURRENCE] * recurs
    functions += [GATED["gelu" if name.startswith("gemma") else "silu"]] * (name in EXPERTS)
    domains = {(o.domain, o.version) for o in model.opset_import}
    assert domains == {("", 24), *[("specrt", 1)] * len(functions)}
    assert [(f.domain, f.name) for f in model.functions] == [("specrt", f) for f in functions]
    for name in buffers:
        if name.startswith((STATE, FACTORS)):
            continue
        users = [n for n in model.graph.node if name in n.input and n.op_type != "Shape"]
        assert [(n.op_type, n.output[0]) for n in users] == [("TensorScatter", f"present_{name}")]
        assert is_ring(name) or users[0].input[2] == "start"
    attentions = [n for n in model.graph.node if n.op_type == "Attention"]
    assert {len(n.input) for n in attentions} <= {4}, "with a mask"
    assert not any(a.name == "is_causal" for n in attentions for a in n.attribute)
    assert len({n.input[3] for n in attentions}) == len(one.geometry.windows)
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)


def run(*args: object) -> str:
    return CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False).stdout


@pytest.mark.parametrize(
    ("role", "steps"),
    [
        ("draft", [["--config-only"], ["--attach", "--check", "--json"]]),
        pytest.param("target", [["--check", "--json"]], marks=pytest.mark.nightly),
    ],
)
def test_codelets_committed_graphs_are_what_is_exported(
    role: str, steps: list[list[str]], engines: Path, tmp_path: Path
) -> None:
    """By the command, which checks them against transformers and leaves nothing registered."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    committed = engines / "codelet" / "portable" / f"{role}.onnx"
    checkpoint, out = engines / "codelet" / "checkpoint" / role, tmp_path / "deep" / "model.onnx"
    said = [run(checkpoint, "--out", out, *options) for options in steps][-1]
    facts: dict[str, Any] = json.loads(said)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert (facts["path"], facts["bytes"]) == (str(out), out.stat().st_size)
    assert facts["parity"]["error"] < 1e-5 < facts["parity"]["tolerance"]
    assert "specrt" not in ALL_ATTENTION_FUNCTIONS
    assert "specrt" not in ALL_MASK_ATTENTION_FUNCTIONS
    made_by = json.loads(facts_of(load(committed))["specrt.exporter"])
    if made_by != exporter():
        pytest.skip(f"the committed graph was made by {made_by}, installed are {exporter()}")
    assert out.read_bytes() == committed.read_bytes(), (
        f"{committed} is out of date: specrt export {checkpoint} --out {committed} --check"
    )


@pytest.mark.parametrize("name", nightly_but(["t5_untied", "whisper"], RECORDED))
def test_an_export_is_the_recorded_graph_with_its_weights(
    name: str, exported: Zoo, tmp_path: Path
) -> None:
    one = exported(name)
    made_by = json.loads(facts_of(load(one.graph))["specrt.exporter"])
    if made_by != exporter():
        pytest.skip(f"recorded with {made_by}, installed are {exporter()}")
    once(export_graph)(one.checkpoint, tmp_path / one.graph.name)
    # transformers goes through a set of layer types, whose order is a process's own.
    seen = contents if re.search("gemma[34]", name) else Path.read_bytes
    for path in one.graph.parent.glob("*.onnx"):
        same = seen(tmp_path / path.name) == seen(path)
        assert same, f"record it again: python -m portable.zoo {name}"


def contents(path: Path) -> Any:
    """Return what a graph holds, in whatever order."""
    graph = load(path).graph
    return Counter(node.op_type for node in graph.node), {t.name: t for t in graph.initializer}


# GPT-NeoX stores a weight under another name than it gives it.
@pytest.mark.parametrize("name", architectures("gpt2", "gpt_neox"))
def test_weights_are_attached_later(name: str, exported: Zoo, tmp_path: Path) -> None:
    one, graph = exported(name), exported(name + BARE).graph
    places = {entry.value for t in load(graph).graph.initializer for entry in t.external_data}
    assert places == {"unattached.safetensors"}
    with pytest.raises(ExportError, match=r"has no weights yet.*--attach"):
        check_parity(one.checkpoint, graph)
    # Checkpoints saved from a model without its head, GPT-2's for one, lack the first part.
    first = next(iter(one.checkpoint.weights)).partition(".")[0]
    short = {n.removeprefix(f"{first}."): w for n, w in one.checkpoint.weights.items()}
    checkpoint = Checkpoint(one.checkpoint.folder, one.checkpoint.config, short)
    whole = attach_graph(graph, checkpoint, tmp_path / "whole.onnx")
    assert whole.path.read_bytes() == one.graph.read_bytes()


def rewritten(
    one: Checkpoint, folder: Path, tensors: Mapping[str, Any], **config: Any
) -> Checkpoint:
    """Save a checkpoint with other tensors (None for one that is left out) and another config."""
    shutil.copytree(one.folder, folder)
    known = one.config | config
    (folder / "config.json").write_text(json.dumps(known), encoding="utf-8")
    held = {name: (w.dtype, map_array(w)) for name, w in one.weights.items()}
    doubles = {name for name, a in tensors.items() if getattr(a, "dtype", None) == np.float64}
    held |= {name: ("F64" if name in doubles else "F32", a) for name, a in tensors.items()}
    kept = {name: tensor for name, tensor in held.items() if tensor[1] is not None}
    (folder / "model.safetensors").write_bytes(container(kept))
    return Checkpoint.open(folder)


EMBEDDING = "transformer.wte.weight"
HEADS: dict[str, tuple[int, Callable[[Any], dict[str, Any]]]] = {
    "another": (2, lambda table: {"lm_head.weight": table[::-1]}),
    "the same": (1, lambda table: {"lm_head.weight": table}),
    "in its place": (1, lambda table: {"lm_head.weight": table, EMBEDDING: None}),
}
"""What a checkpoint holds that its config.json ties, and how many tables that is."""


@pytest.mark.parametrize("name", HEADS)
def test_what_a_checkpoint_holds_decides_what_is_tied(
    name: str, exported: Zoo, tmp_path: Path
) -> None:
    one, (count, of) = exported("gpt2").checkpoint, HEADS[name]
    assert one.config["tie_word_embeddings"]
    changed = rewritten(one, tmp_path / "model", of(map_array(one.weights[EMBEDDING])))
    graph = attach_graph(exported("gpt2" + BARE).graph, changed, tmp_path / "graph.onnx").path
    check_weights(graph, changed)
    assert check_parity(changed, graph).error < 1e-5
    tables = {t.name for t in external_tensors(load(graph))} & {"lm_head.weight", EMBEDDING}
    assert len(tables) == count


LAYER, SIX = "transformer.h.0", np.ones(6, np.float32)
UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "norms": ({f"{LAYER}.attn.q_norm.weight": SIX, "b": SIX}, r"q_norm\.weight and 1 more tensors"),
    "a bias": (
        {"lm_head.bias": SIX},
        r"lm_head\.bias, .* config\.json reads; correct config\.json",
    ),
    "doubles": ({f"{LAYER}.ln_1.bias": np.ones(32)}, r"stored as F64; .*float32.*save_pretrained"),
    "no bias": ({f"{LAYER}.ln_1.bias": None}, r"holds no weight transformer\.h\.0\.ln_1\.bias"),
}


@pytest.mark.parametrize(("tensors", "message"), UNREAD.values(), ids=UNREAD)
def test_a_checkpoint_that_is_not_what_its_config_says_is_refused(
    tensors: dict[str, Any], message: str, exported: Zoo, tmp_path: Path
) -> None:
    changed = rewritten(exported("gpt2").checkpoint, tmp_path / "model", tensors)
    with pytest.raises(CheckpointError, match=message):
        check_weights(
            attach_graph(exported("gpt2" + BARE).graph, changed, tmp_path / "g.onnx").path, changed
        )


def test_tensors_that_change_nothing_may_be_there(exported: Zoo, tmp_path: Path) -> None:
    """Masks of old checkpoints, zeros that some quantizers write as biases, further predictors."""
    names = (
        f"{LAYER}.attn.bias", f"{LAYER}.attn.masked_bias", "rotary_emb.inv_freq", "mtp.fc.weight",
        "model.position_ids", "model.layers.3.mlp.up_proj.weight", "v_head.summary.weight",
    )  # fmt: skip
    tensors = {**dict.fromkeys(names, SIX), "lm_head.bias": 0 * SIX, "final_logits_bias": 0 * SIX}
    changed = rewritten(
        exported("gpt2").checkpoint, tmp_path / "model", tensors,
        num_hidden_layers=2, num_nextn_predict_layers=2,
    )  # fmt: skip
    graph = attach_graph(exported("gpt2" + BARE).graph, changed, tmp_path / "g.onnx").path
    assert check_weights(graph, changed).layers == 2


LLAMA = {"model_type": "llama"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "mamba cannot be exported: .* by another rule"),
        ({"model_type": "jetmoe", "num_local_experts": 8}, "experts .num_local_experts is 8"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({**LLAMA, "rope_parameters": {"rope_type": "su"}}, "rope type 'su' changes"),
        ({"model_type": "acme", "auto_map": {"AutoConfig": "x.Y"}}, "own checkpoint .auto_map."),
        ({"model_type": "acme"}, "does not know this model type"),
        ({"model_type": "gptj"}, "GPTJForCausalLM computes attention itself"),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else "",
)
def test_a_model_without_a_portable_graph_is_refused_before_any_work(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stages: list[str] = []
    with pytest.raises(ExportError, match=message):
        export_graph(
            Checkpoint(tmp_path, config, {}), tmp_path / "out.onnx", progress=stages.append
        )
    assert stages == []
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_lies_in_strips_is_put_together_of_them(
    exported: Zoo, tmp_path: Path
) -> None:
    bare, whole = exported("olmo_hybrid" + BARE), tmp_path / "whole"
    tensors = load_file(bare.checkpoint.folder / "model.safetensors")
    strips = [f"model.layers.0.linear_attn.{one}_conv1d.weight" for one in "qkv"]
    made = attach_graph(bare.graph, bare.checkpoint, tmp_path / "strips.onnx").path
    assert [[*node.input] for node in load(made).graph.node if strips[0] in node.input] == [strips]
    shutil.copytree(bare.checkpoint.folder, whole)
    rows = tensors[strips[1]]
    for wrong, message in (
        (rows[1:], "rows, config.json calls for 112 together"),
        (rows[:, :, 1:], "has shape"),
        (None, "holds no weight"),
    ):
        there = {n: t for n, t in ({**tensors, strips[1]: wrong}).items() if t is not None}
        save_file(there, whole / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            attach_graph(bare.graph, Checkpoint.open(whole), tmp_path / "wrong.onnx")
    one = np.concatenate([tensors.pop(name) for name in strips])
    name = strips[0].replace("q_conv1d", "conv1d")
    save_file({**tensors, name: one}, whole / "model.safetensors")
    made = attach_graph(bare.graph, Checkpoint.open(whole), tmp_path / "whole.onnx").path
    assert name in {tensor.name for tensor in external_tensors(load(made))}


def test_a_graph_that_fails_its_check_replaces_nothing(
    exported: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, out = exported("gpt2"), tmp_path / "model[1].onnx"
    before = exported("gpt2" + BARE).graph.read_bytes()
    out.write_bytes(before)
    limits = equivalence.check_parity.__kwdefaults__ | {"tolerance": 0.0, "reach": 8}
    monkeypatch.setattr(equivalence.check_parity, "__kwdefaults__", limits)
    with pytest.raises(ExportError, match="disagrees with the model at 'prefill'"):
        run(one.checkpoint.folder, "--out", out, "--attach", "--check")
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


WITHOUT_EXPORTER = """
import sys
sys.modules["onnx_ir"] = None
from specrt.cli import main
main()
"""


def test_the_command_refuses_in_one_line(exported: Zoo, tmp_path: Path) -> None:
    refused = CliRunner().invoke(command, [".", "--out", "x", "--config-only", "--check"])
    assert refused.exit_code == 2
    assert "--config-only has no weights to check" in refused.stderr
    out = tmp_path / "none.onnx"
    with pytest.raises(ExportError, match=r"none\.onnx is not an ONNX graph"):
        run(exported("gpt2").checkpoint.folder, "--out", out, "--attach")
    assert list(tmp_path.iterdir()) == []
    line = [sys.executable, "-c", WITHOUT_EXPORTER, "export", str(tmp_path), "--out", "x.onnx"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "needs onnx_ir; install it with `make setup-export`" in done.stderr
    assert done.stderr.count("\n") == 1
