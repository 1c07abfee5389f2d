"""`specrt lint`, and what it says of graphs as they are exported."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest

from lint.test_rules import Graph, attention, relu, scatter
from specrt import cli
from specrt_export.lint import lint

Said = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A graph with one fault."""
    return saved(attention(softcap=2.0), tmp_path)


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


def test_a_fault_is_named_with_its_remedy(path: Path, tmp_path: Path, capsys: Said) -> None:
    assert cli.run(["lint", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("refused: n: softcap is 2")
    assert "Softmax" in out
    assert cli.run(["lint", str(path), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert sorted(found) == ["node", "reason", "remedy", "rule", "severity"]
    assert (found["rule"], found["severity"]) == ("attention-softcap", "refused")
    assert cli.run(["lint", str(saved(relu(), tmp_path))]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert cli.run(["lint", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    slow = attention(mask=onnx.TensorProto.BOOL)
    assert cli.run(["lint", str(saved(slow, tmp_path))]) == 0
    assert capsys.readouterr().out.startswith("slow: n: ")


def test_the_version_decides(tmp_path: Path, capsys: Said) -> None:
    path = saved(scatter(), tmp_path)
    assert cli.run(["lint", str(path), "--tensorrt", "10.15.1.29"]) == 0
    assert cli.run(["lint", str(path), "--tensorrt", "10.13"]) == 1
    assert "10.15" in capsys.readouterr().out


def test_names_cannot_write_to_the_terminal(tmp_path: Path, capsys: Said) -> None:
    graph = attention(softcap=2.0)
    graph.graph.node[0].name = "\x1b[2Jn\n"
    assert cli.run(["lint", str(saved(graph, tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2


def refusal(capsys: Said, *args: Any) -> str:
    assert cli.run(["lint", *map(str, args)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    return shown.err


def test_what_is_no_graph_is_refused(path: Path, tmp_path: Path, capsys: Said) -> None:
    for version in ("", "10.2", "11.0x", "-1.0"):
        assert "--tensorrt is" in refusal(capsys, path, f"--tensorrt={version}")
    whole = path.read_bytes()
    for content in (b"", b"not ONNX", bytes(range(256)) * 16, whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert refusal(capsys, path).startswith(f"specrt: {path} is not an ONNX graph")
    with path.open("wb") as file:
        file.truncate(3 << 30)
    assert "external data" in refusal(capsys, path), "unread"
    assert "cannot be read" in refusal(capsys, tmp_path / "none.onnx")
    assert "is a folder" in refusal(capsys, tmp_path)


def test_external_data_is_looked_for_beside_the_graph(
    tmp_path: Path, draft: tuple[Path, Path], capsys: Said
) -> None:
    path = Path(shutil.copy(draft[0], tmp_path))

    def rules() -> list[str]:
        cli.run(["lint", str(path), "--json"])
        return [found["rule"] for found in json.loads(capsys.readouterr().out)]

    assert "weight-missing" not in rules(), "the weights of a portable graph lie elsewhere"
    model = onnx.load(path, load_external_data=False)
    del model.metadata_props[:]
    path.write_bytes(model.SerializeToString())
    assert rules().count("weight-missing") == 1
