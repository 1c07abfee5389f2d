"""Rows as tables, for a terminal or for a README."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrt.bench.report import Task
from specrt.bench.row import Row
from specrt.bench.spread import Spread


@dataclass(frozen=True)
class Table:
    """A title, names of columns, and cells that are already text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_text(self) -> str:
        """Return aligned columns."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        shown = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *shown])

    def to_markdown(self) -> str:
        """Return a Markdown table under its title."""
        lines = [self.columns, ["---:"] * len(self.columns), *self.rows]
        return "\n".join([self.title, "", *("| " + " | ".join(line) + " |" for line in lines)])


_SPEED = (
    "gamma", "drafter", "tokens/s", "speedup", "quartiles", "overall", "", "accepted", "yield",
    "tokens/round", "TTFT ms", "ITL p50", "p95 ms",
)  # fmt: skip
_ROUND = (
    "gamma", "drafter", "draft us", "verify us", "accept us", "other us", "outside us",
    "weights GB/s", "accepted at 1, 2, ...",
)  # fmt: skip


def speed_table(task: Task, title: str) -> Table:
    """Return how fast each configuration was, the losing ones marked."""
    return Table(title, _SPEED, [_speed(row) for row in task.rows])


def round_table(task: Task, title: str) -> Table:
    """Return where the time of a round goes, and how far drafts are right."""
    return Table(title, _ROUND, [_round(row) for row in task.rows])


def _speed(row: Row) -> list[str]:
    counts, drafted = row.counts, row.counts.drafted > 0
    p50, p95 = row.itl_ms
    mark = "slower" if row.standing == "slower" else ""
    return [
        *_name(row),
        f"{row.tokens_per_second.median:.0f}",
        f"{row.speedup.median:.2f}",
        "" if row.configuration.is_plain else f"{row.speedup.low:.2f}-{row.speedup.high:.2f}",
        f"{row.overall:.2f}",
        mark,
        f"{counts.acceptance_rate:.3f}" if drafted else "",
        f"{counts.draft_yield:.3f}" if drafted else "",
        f"{counts.tokens_per_round:.2f}",
        f"{row.ttft_ms.median:.1f}",
        f"{p50:.2f}",
        f"{p95:.2f}",
    ]


def _round(row: Row) -> list[str]:
    def us(spread: Spread) -> str:
        return f"{spread.median:.0f}"

    return [
        *_name(row),
        *map(us, row.stages.values()),
        us(row.outside_us),
        f"{row.weights_per_second.median / 1e9:.1f}",
        " ".join(f"{rate:.2f}" for rate in row.acceptance_by_position),
    ]


def _name(row: Row) -> tuple[str, str]:
    gamma, drafter = row.configuration
    return str(gamma), "" if row.configuration.is_plain else drafter
