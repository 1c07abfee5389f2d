"""What a benchmark measured: a row per task and configuration, as text, Markdown or JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from errno import EISDIR
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import fill
from typing import Any, NamedTuple

from specrt.bench.lossless import Comparison
from specrt.bench.measure import Environment, Footprint, Samples
from specrt.bench.samples import PLAIN, BenchRow, Configuration, Sample, Spread, repeated_tokens
from specrt.errors import RequestError
from specrt.params import AUTO
from specrt.system import Bandwidth

ALL = "all"
"""The class of every prompt, where there is more than one."""


@dataclass(frozen=True)
class Task:
    """One class of prompts: code, prose, text copied from the prompt."""

    category: str
    prompts: int
    rows: tuple[BenchRow, ...]
    """Plain decoding first."""
    repetition: float
    """Share of plain output inside a 16-token run that came before: text that loops."""

    @property
    def plain(self) -> BenchRow:
        """Plain decoding."""
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        """Return the class as plain JSON types."""
        return {
            "category": self.category,
            "prompts": self.prompts,
            "repetition": round(self.repetition, 4),
            "results": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True)
class BenchReport:
    """Each class apart, and all together where there are several."""

    tasks: tuple[Task, ...]
    outputs: Comparison

    @property
    def total(self) -> Task:
        """All prompts."""
        return self.tasks[-1]

    def to_json(self) -> dict[str, Any]:
        """Return everything measured as plain JSON types."""
        return {
            "outputs": self.outputs.to_json(),
            "tasks": [task.to_json() for task in self.tasks],
        }


def report(
    samples: Samples, categories: Sequence[str], outputs: Comparison, weight_bytes: int
) -> BenchReport:
    """Sort samples by the category of their prompt.

    `categories` holds one entry a prompt; `weight_bytes` are the target's.
    """
    names = list(dict.fromkeys(categories))
    of = {n: {i for i, c in enumerate(categories) if c == n} for n in names}
    if len(names) > 1:
        of[ALL] = set(range(len(categories)))
    tasks = (_task(name, samples, members, weight_bytes) for name, members in of.items())
    return BenchReport(tuple(tasks), outputs)


def _task(name: str, samples: Samples, members: set[int], weight_bytes: int) -> Task:
    its: Mapping[Configuration, list[Sample]] = {
        c: [s for s in found if s.prompt in members] for c, found in samples.items()
    }
    plain = {s.pair: s for s in its[PLAIN]}
    rows = tuple(BenchRow(c, found, plain, weight_bytes) for c, found in its.items())
    once = [s.tokens for s in its[PLAIN] if s.repeat == 0]
    loops = sum(map(repeated_tokens, once)) / sum(map(len, once))
    return Task(name, len(members), rows, loops)


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


def _speed(row: BenchRow) -> list[str]:
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


def _round(row: BenchRow) -> list[str]:
    def us(spread: Spread) -> str:
        return f"{spread.median:.0f}"

    return [
        *_name(row),
        *map(us, row.stages.values()),
        us(row.outside_us),
        f"{row.weights_per_second.median / 1e9:.1f}",
        " ".join(f"{rate:.2f}" for rate in row.acceptance_by_position),
    ]


def _name(row: BenchRow) -> tuple[str, str]:
    gamma, drafter = row.configuration
    return str(gamma), "" if row.configuration.is_plain else drafter


def verdicts(report: BenchReport) -> list[str]:
    """Return a sentence for each class of tasks, and one on the outputs."""
    several = len(report.tasks) > 1
    told = [f"{task.category}: {_verdict(task)}" if several else _verdict(task)
            for task in report.tasks]  # fmt: skip
    return [*told, str(report.outputs)]


def _verdict(task: Task) -> str:
    drafting = [row for row in task.rows if not row.configuration.is_plain]
    parts = [_best(max(drafting, key=lambda row: row.speedup.median))] if drafting else []
    autos = [row for row in drafting if row.configuration.gamma == AUTO]
    fixed = [row for row in drafting if row.configuration.gamma != AUTO]
    if autos and fixed:
        parts.append(_auto(autos, fixed))
    parts += [_fallback(row) for row in drafting if row.counts.fallback]
    parts.append(f"{task.repetition:.0%} of the plain output repeats an earlier run of 16 tokens")
    return "; ".join(parts)


def _best(row: BenchRow) -> str:
    speed, name = row.speedup, row.configuration
    gain = f"{speed.median:.2f}x (quartiles {speed.low:.2f} to {speed.high:.2f})"
    if speed.median <= 1.0:
        return f"speculation does not pay here: the best, {name}, is {gain} plain decoding"
    return f"{name} is {gain} plain decoding{_cost(row)}"


def _cost(row: BenchRow) -> str:
    """Say what a drafted token and a verify pass cost, in steps of the target."""
    share, gamma = row.draft_steps, row.configuration.gamma
    if share is None:
        return ""
    drafted = f"; a drafted token costs {share:.1%} of a target step"
    width = "a draft" if gamma == AUTO else f"{gamma + 1} tokens"
    return f"{drafted} and verifying {width} {row.verify_steps:.2f} steps"


def _auto(autos: list[BenchRow], fixed: list[BenchRow]) -> str:
    """Hold the gamma policy to the best that any fixed gamma reached."""
    auto = max(autos, key=lambda row: row.overall)
    best = max(fixed, key=lambda row: row.overall)
    return (
        f"over the whole run {auto.configuration} is {auto.overall:.2f}x and the best fixed, "
        f"{best.configuration}, {best.overall:.2f}x"
    )


def _fallback(row: BenchRow) -> str:
    """Say how often a limit was crossed."""
    off = sum(s.counts.fallback is not None for s in row.samples)
    return (
        f"{row.configuration} fell back in {off} of {len(row.samples)} completions: "
        f"{row.counts.fallback}"
    )


@dataclass(frozen=True)
class Summary:
    """A report, what it holds for, and what memory had to do with it."""

    setting: Environment
    report: BenchReport
    memory: Footprint
    bandwidth: Bandwidth

    @property
    def sentences(self) -> list[str]:
        """What was found, in words."""
        return [*verdicts(self.report), self._reading(), str(self.memory)]

    def _reading(self) -> str:
        """Hold plain decoding, which reads every weight for a token, to what memory can give."""
        read = self.report.total.plain.weights_per_second.median
        share = read / self.bandwidth.bytes_per_second
        inside = "; more than memory gives, so weights stay in the cache" if share > 1 else ""
        return (
            f"plain decoding reads {read / 1e9:.1f} GB/s of weights in the target's passes, "
            f"{share:.0%} of {self.bandwidth}{inside}"
        )

    def to_text(self) -> str:
        """Return tables and sentences for a terminal."""
        tables = (table.to_text() for table in self._tables(str))
        return "\n\n".join([str(self.setting), *tables, "\n".join(self.sentences)])

    def to_markdown(self) -> str:
        """Return tables and sentences for a README."""
        tables = (table.to_markdown() for table in self._tables(lambda name: f"**{name}**"))
        said = "\n".join(f"- {sentence}" for sentence in self.sentences)
        return "\n\n".join([str(self.setting), *tables, said])

    def _tables(self, title: Callable[[str], str]) -> list[Table]:
        speeds = [speed_table(t, f"{title(t.category)}, {_prompts(t)}") for t in self.report.tasks]
        total = self.report.total
        rounds = f"{title('a round')}, {_prompts(total)}: where its time goes"
        return [*speeds, round_table(total, rounds)]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return {
            **self.setting.to_json(),
            **self.report.to_json(),
            "memory": self.memory.to_json(),
            "bandwidth": self.bandwidth.to_json(),
            "verdict": self.sentences,
        }


def _prompts(task: Task) -> str:
    return f"{task.prompts} prompt{'s' if task.prompts > 1 else ''}"


FORMATS = (".png", ".svg", ".pdf")


class Point(NamedTuple):
    """A fixed gamma and its throughput."""

    gamma: int
    tokens_per_second: Spread


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before anything is measured.

    Raises: RequestError with the remedy.
    """
    folder = path.parent
    if path.suffix.lower() not in FORMATS:
        raise RequestError(f"--plot is {str(path)!r}; expected a name ending in .png, .svg or .pdf")
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        with TemporaryFile(dir=folder):  # what may be written is known only by writing
            pass
    except OSError as error:
        raise RequestError(
            f"{path} cannot be written: {error.strerror}; name a file in a folder that can be"
        ) from None
    if find_spec("matplotlib") is None:
        raise RequestError('--plot needs matplotlib; pip install "specrt[plot]", or leave it out')


def curves(task: Task) -> dict[str, list[Point]]:
    """Return a curve for each drafter over the fixed gammas, each from plain decoding on."""
    plain = Point(0, task.plain.tokens_per_second)
    found: dict[str, list[Point]] = {}
    for row in task.rows:
        gamma, drafter = row.configuration
        if gamma != AUTO and row.configuration != PLAIN:
            found.setdefault(drafter, [plain]).append(Point(gamma, row.tokens_per_second))
    return {drafter: sorted(points) for drafter, points in found.items()}


def levels(task: Task) -> dict[str, float]:
    """Return what has no place over gamma: plain decoding, and gamma auto for each drafter."""
    found = {"plain": task.plain.tokens_per_second.median}
    for row in task.rows:
        if row.configuration.gamma == AUTO:
            found[f"auto ({row.configuration.drafter})"] = row.tokens_per_second.median
    return found


def draw(report: BenchReport, path: Path, title: str) -> None:
    """Write the picture, one panel a class of tasks; whole, or not at all.

    Whiskers are quartiles.
    """
    figure_type: Any = import_module("matplotlib.figure").Figure
    count = len(report.tasks)
    figure = figure_type(figsize=(4.0 * count + 1.0, 3.6), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for panel, task in zip(panels, report.tasks, strict=True):
        _panel(panel, task)
    figure.suptitle(fill(title, 60 * count), fontsize="small")
    partial = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(partial, dpi=150)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _panel(panel: Any, task: Task) -> None:
    for drafter, points in curves(task).items():
        speeds = [p.tokens_per_second for p in points]
        middle = [s.median for s in speeds]
        below = [s.median - s.low for s in speeds]
        above = [s.high - s.median for s in speeds]
        places = [p.gamma for p in points]
        panel.errorbar(places, middle, yerr=(below, above), marker="o", capsize=3, label=drafter)
    for number, (name, speed) in enumerate(levels(task).items()):
        panel.axhline(speed, linestyle="--", linewidth=1, color=f"C{7 + number}", label=name)
    panel.set_title(f"{task.category}, {task.prompts} prompts")
    panel.set_xlabel("gamma")
    panel.set_ylabel("tokens/s")
    panel.set_ylim(bottom=0)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(fontsize="small")
