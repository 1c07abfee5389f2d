"""Tokens per second over gamma, as a picture. Needs matplotlib, which the runtime does not."""

from __future__ import annotations

import os
from errno import EISDIR
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import fill
from typing import Any, NamedTuple

from specrt.bench.configuration import PLAIN
from specrt.bench.report import Report, Task
from specrt.bench.spread import Spread
from specrt.errors import RequestError
from specrt.models import AUTO

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


def draw(report: Report, path: Path, title: str) -> None:
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
