"""Tables and progress, which every verb shares."""

from __future__ import annotations

import io

import pytest

from specrt.cli.options import progress, table


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
