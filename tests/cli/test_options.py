"""Tables and progress, which every verb shares."""

from __future__ import annotations

import io
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.cli.options import progress, table

CELLS = st.text("abc 1.", max_size=6).map(str.strip)


@settings(max_examples=40)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n))),
       st.integers(0, 2))  # fmt: skip
def test_a_table_holds_every_cell_in_its_column(rows: list[list[str]], left: int) -> None:
    columns = [f"c{number}" for number in range(len(rows[0]) if rows else 2)]
    left = min(left, len(columns))
    lines = table(columns, rows, left=left).split("\n")
    assert len(lines) == 1 + len(rows)
    assert all(line == line.rstrip() for line in lines)
    ends = [lines[0].index(name) + len(name) for name in columns]
    for row, line in zip(rows, lines[1:], strict=True):
        for place, cell in enumerate(row):
            if place >= left:
                assert line.ljust(ends[-1])[: ends[place]].endswith(cell)
    markdown = table(columns, rows, left=left, markdown=True).split("\n")
    assert {line.count("|") for line in markdown} == {len(columns) + 1}
    assert len(markdown) == 2 + len(rows)


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
