"""Tables and progress, which every verb shares."""

from __future__ import annotations

import io
import threading

import pytest

from specrt.cli.options import progress, table


def test_a_table_holds_every_cell_in_its_column() -> None:
    rows = [("a b", "1.5", ""), ("c", "", "12345")]
    found = table(("name", "ms", "tokens"), rows, left=1)
    assert found == "name   ms  tokens\na b   1.5\nc           12345"


class Stream(io.StringIO):
    """Standard error, and an event once it has four lines."""

    enough = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.getvalue().count("\n") >= 4:
            self.enough.set()
        return count


def test_a_pipe_gets_lines_while_nothing_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrt.cli.options.INTERVAL_S", 0.001)
    pipe = Stream()
    monkeypatch.setattr("sys.stderr", pipe)
    with progress("build x") as show:
        show(0.25, "lower")
        assert pipe.enough.wait(60)
    lines = pipe.getvalue().splitlines()
    assert "build x:  25% lower" in lines
    assert all(line.startswith("build x: ") for line in lines)
    assert not any(thread.name == "specrt progress" for thread in threading.enumerate())


def test_a_terminal_has_one_line_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Stream()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    with progress("verify") as show:
        show(0.5, "")
        show(1.0, "")
    assert terminal.getvalue().split("\r")[1:] == ["verify:  50%\x1b[K", "verify: 100%\x1b[K\n"]
