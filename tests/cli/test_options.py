"""Tables and progress, which every verb shares."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.conftest import Run
from specrt.cli.options import progress, table
from specrt.errors import ExportError


def test_a_table_holds_every_cell_in_its_column() -> None:
    rows = [("a b", "1.5", ""), ("c", "", "12345")]
    found = table(("name", "ms", "tokens"), rows, left=1)
    assert found == "name   ms  tokens\na b   1.5\nc           12345"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_is_a_line_that_stays(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(pipe, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", pipe)
    with progress("build x") as show:
        for share, stage in ((0.25, "lower"), (0.4, "warning: little memory"), (0.5, "check")):
            show(share, stage)
    (kept,) = (line for line in pipe.getvalue().split("\n") if "little memory" in line)
    shown = kept.rpartition("\r")[2].removesuffix("\x1b[K")
    assert shown == "warning: little memory"


def test_an_export_is_heard_of_in_a_pipe(
    cli: Run, engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export_graph(*_: object, progress: Callable[[str], None]) -> None:
        progress("trace")
        raise ExportError("that is all")

    exporter = SimpleNamespace(export_graph=export_graph, attach_graph=None)
    monkeypatch.setitem(sys.modules, "specrt_export.portable.exporter", exporter)
    ran = cli("export", engines / "codelet/checkpoint/draft", "--out", tmp_path / "a.onnx")
    assert ran.status == 2
    first, last = ran.err.splitlines()
    assert (first[:13], last) == ("export: trace", "specrt: that is all")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in cli("export", tmp_path / "empty", "--out", "a.onnx").refusal
