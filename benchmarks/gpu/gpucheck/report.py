"""What a run says: a line for each step that runs, and all of it at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpucheck.step import FAILED, NOT_RUN, OK, Outcome
from gpucheck.table import figures_table, steps_table
from gpucheck.wanted import Figure

_NAMED = 3
"""How many steps that were not run for one reason are called by their names."""


def progress(done: Outcome) -> str:
    """Return how a step ended, to stand behind its name; why it did not run is said at the end."""
    if done.status == NOT_RUN:
        return NOT_RUN
    said = f"{done.status}, {done.seconds:.1f} s"
    return f"{said}: {done.reason}" if done.reason else said


def report(
    outcomes: Sequence[Outcome], data: dict[str, Any], found: Sequence[Figure], out: Path
) -> str:
    """Return what ran, what did not and why, the figures, and how many there are of each."""
    ran = [one for one in outcomes if one.status != NOT_RUN]
    parts = [steps_table(ran)] if ran else []
    parts += ["\n".join(not_run(outcomes))] if len(ran) < len(outcomes) else []
    parts.append(figures_table(found))
    counts = [f"{sum(o.status == s for o in outcomes)} {s}" for s in (OK, FAILED, NOT_RUN)]
    return "\n\n".join([*parts, "\n".join([", ".join(counts), *earlier(ran, data, out)])])


def not_run(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each reason why steps were not run."""
    reasons: dict[str, list[str]] = {}
    for one in outcomes:
        if one.status == NOT_RUN:
            reasons.setdefault(one.reason, []).append(one.key)
    return [
        f"{', '.join(keys) if len(keys) <= _NAMED else f'{len(keys)} steps'} not run: {reason}"
        for reason, keys in reasons.items()
    ]


def earlier(ran: Sequence[Outcome], data: dict[str, Any], out: Path) -> list[str]:
    """Return a line that counts what earlier runs left in the file, if they left anything."""
    now = {one.key for one in ran}
    more = [k for k, one in data["steps"].items() if one["status"] != NOT_RUN and k not in now]
    return [f"{len(more)} more in {out} from earlier runs"] if more else []


def kept(work: Path, out: Path) -> str:
    """Return where a run leaves something, and how large that is."""
    lines = [f"results: {out} ({size(taken(out))})"]
    if work.is_dir():
        lines.append(f"bundles and plans: {work} ({size(taken(work))})")
    return "\n".join(lines)


def taken(path: Path) -> int:
    """Return what a file takes on the disk, or all files in a folder."""
    files = [path]
    for folder, _, names in os.walk(path):
        files += [Path(folder, name) for name in names]
    return sum(_blocks(file) for file in files)


def _blocks(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except OSError:  # it went away meanwhile: slices may run side by side
        return 0


def size(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, bytes_ in (("GB", 10**9), ("MB", 10**6)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count / 1000:.0f} kB"
