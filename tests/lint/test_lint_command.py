"""`specrt lint`, and what it says of graphs as they are exported."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from lint.test_rules import attention, relu, scatter
from specrt import cli
from specrt_export.lint import lint

LAYERS = {"draft": 2, "target": 8}


@pytest.fixture
def softcap(tmp_path: Path) -> Path:
    return saved(attention(softcap=2.0), tmp_path)


def saved(graph: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "g.onnx"
    path.write_bytes(graph.SerializeToString())
    return path


@pytest.mark.parametrize("role", LAYERS)
def test_portable_graphs_need_lowering(engines: Path, role: str) -> None:
    path = engines / "codelet" / "portable" / f"{role}.onnx"
    graph, layers = onnx.load(path, load_external_data=False), LAYERS[role]
    found = Counter((f.rule, f.severity) for f in lint(graph, (11, 0)))
    # fp32 attention without the attribute, and two caches a layer of a length still open.
    kernel, length = ("attention-kernel", "refused"), ("cache-length", "refused")
    assert found == {kernel: layers, length: 2 * layers}
    assert found == Counter((f.rule, f.severity) for f in lint(graph, (11, 4)))


@pytest.mark.parametrize("role", LAYERS)
def test_portable_graphs_on_the_oldest_version(engines: Path, role: str) -> None:
    path = engines / "codelet" / "portable" / f"{role}.onnx"
    findings = lint(onnx.load(path, load_external_data=False), (10, 3))
    refused = Counter(f.reason.split()[0] for f in findings if f.severity == "refused")
    assert refused == {"Attention": LAYERS[role], "TensorScatter": 2 * LAYERS[role]}
    assert all("decomp" in f.remedy or "ScatterElements" in f.remedy for f in findings[:-1])
    assert [(f.rule, f.severity) for f in findings[-1:]] == [("opset", "dropped")]


def test_a_clean_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(relu(), tmp_path)
    assert cli.run(["lint", str(path)]) == 0
    assert "nothing" in capsys.readouterr().out
    assert cli.run(["lint", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_fault_is_named_with_its_remedy(
    softcap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["lint", str(softcap)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("refused: n: softcap is 2")
    assert "Softmax" in out


def test_json_holds_every_field(softcap: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["lint", str(softcap), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert sorted(found) == ["node", "reason", "remedy", "rule", "severity"]
    assert (found["rule"], found["severity"]) == ("attention-softcap", "refused")


def test_slow_alone_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(mask=onnx.TensorProto.BOOL), tmp_path)
    assert cli.run(["lint", str(path)]) == 0
    assert capsys.readouterr().out.startswith("slow: n: ")


def test_the_version_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(scatter(), tmp_path)
    assert cli.run(["lint", str(path), "--tensorrt", "10.15.1.29"]) == 0
    assert cli.run(["lint", str(path), "--tensorrt", "10.13"]) == 1
    assert "10.15" in capsys.readouterr().out


def test_nodes_alike_share_a_line(engines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = engines / "codelet" / "portable" / "target.onnx"
    assert cli.run(["lint", str(graph)]) == 1
    out = capsys.readouterr().out
    assert "and 13 more" in out
    assert len(out.splitlines()) < 10


def test_names_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = attention(softcap=2.0)
    graph.graph.node[0].name = "\x1b[2Jn\n"
    assert cli.run(["lint", str(saved(graph, tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize("content", [b"", b"not ONNX", b"\x08\x0b", bytes(range(256)) * 16])
def test_what_is_no_graph_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "g.onnx"
    path.write_bytes(content)
    assert refusal(capsys, str(path)).startswith(f"specrt: {path} is not an ONNX graph")


def test_a_cut_file_is_refused(softcap: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = softcap.read_bytes()
    softcap.write_bytes(whole[: len(whole) // 2])
    assert "is not an ONNX graph" in refusal(capsys, str(softcap))


def test_a_huge_file_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g.onnx"
    with path.open("wb") as file:
        file.truncate(3 << 30)
    assert "external data" in refusal(capsys, str(path))


def test_missing_files_and_folders_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot be read" in refusal(capsys, str(tmp_path / "none.onnx"))
    assert "is a folder" in refusal(capsys, str(tmp_path))


@pytest.mark.parametrize("version", ["", "9.3", "10.2", "eleven", "11.0x", "-1.0", "1e9.0"])
def test_bad_versions_are_refused(
    softcap: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    assert "--tensorrt is" in refusal(capsys, str(softcap), f"--tensorrt={version}")


def test_external_data_is_looked_for_beside_the_graph(
    tmp_path: Path, engines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "draft.onnx"
    shutil.copyfile(engines / "codelet" / "portable" / "draft.onnx", path)
    cli.run(["lint", str(path), "--json"])
    rules = [f["rule"] for f in json.loads(capsys.readouterr().out)]
    assert "weight-missing" not in rules, "the weights of a portable graph lie elsewhere"
    model = onnx.load(path, load_external_data=False)
    del model.metadata_props[:]
    path.write_bytes(model.SerializeToString())
    cli.run(["lint", str(path), "--json"])
    rules = [f["rule"] for f in json.loads(capsys.readouterr().out)]
    assert rules.count("weight-missing") == 1
    np.zeros(1).tofile(tmp_path / "model.safetensors")
    cli.run(["lint", str(path), "--json"])
    rules = [f["rule"] for f in json.loads(capsys.readouterr().out)]
    assert "weight-missing" not in rules
    assert "weight-size" in rules


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert cli.run(["lint", *args]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    return shown.err
