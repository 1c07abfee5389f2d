"""`specrt export`, as typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specrt.cli.export import command
from specrt.errors import CheckpointError, ExportError

pytest.importorskip("onnx_ir", reason="exporting needs more: make setup-export")

from export.zoo import Exported

pytestmark = pytest.mark.export

Zoo = Callable[[str], Exported]


def run(*args: object) -> str:
    return CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False).stdout


def test_export_prints_what_it_made(exported: Zoo, tmp_path: Path) -> None:
    one, out = exported("opt"), tmp_path / "deep" / "opt.onnx"
    facts: dict[str, Any] = json.loads(
        run(one.checkpoint.folder, "--out", out, "--check", "--json")
    )
    assert out.read_bytes() == one.graph.path.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["opt.onnx"]
    assert (facts["path"], facts["nodes"]) == (str(out), one.graph.nodes)
    assert facts["bytes"] == out.stat().st_size
    assert facts["peak_memory_bytes"] > 1e8
    assert facts["parity"]["error"] < facts["parity"]["tolerance"]
    assert len(facts["parity"]["cases"]) == 3


def test_config_only_then_attach(exported: Zoo, tmp_path: Path) -> None:
    one, out = exported("opt"), tmp_path / "opt.onnx"
    out.write_text("an older file")
    said = run(one.checkpoint.folder, "--out", out, "--config-only")
    assert said.startswith(f"{out}: {one.graph.nodes} nodes, ")
    assert b"unattached.safetensors" in out.read_bytes()
    said = run(one.checkpoint.folder, "--out", out, "--attach", "--check")
    assert "parity: error " in said
    assert "argmax equal in 48 of 48 rows: prefill, offset, rollback" in said
    assert out.read_bytes() == one.graph.path.read_bytes()


def test_a_graph_that_fails_its_check_replaces_nothing(
    exported: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrt_export.check import equivalence

    out = tmp_path / "opt.onnx"
    out.write_text("the last good one")
    monkeypatch.setattr(equivalence.check_parity, "__kwdefaults__", {"tolerance": 0.0, "reach": 8})
    with pytest.raises(ExportError, match="disagrees with the model at 'prefill'"):
        run(exported("opt").checkpoint.folder, "--out", out, "--check")
    assert out.read_text() == "the last good one"
    assert [path.name for path in tmp_path.iterdir()] == ["opt.onnx"]


def test_a_missing_extra_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("specrt_export.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(ExportError, match=r'needs onnx_ir; install it with `pip install "specrt'):
        run(tmp_path, "--out", tmp_path / "x.onnx")


def test_errors_are_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        run(tmp_path, "--out", tmp_path / "x.onnx")
    refused = CliRunner().invoke(command, [".", "--out", "x", "--config-only", "--check"])
    assert refused.exit_code == 2
    assert "--config-only has no weights to check" in refused.stderr
