"""What was found, in words."""

from __future__ import annotations

from specrt.bench.report import Report, Task
from specrt.bench.row import Row
from specrt.models import AUTO


def verdicts(report: Report) -> list[str]:
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


def _best(row: Row) -> str:
    speed, name = row.speedup, row.configuration
    gain = f"{speed.median:.2f}x (quartiles {speed.low:.2f} to {speed.high:.2f})"
    if speed.median <= 1.0:
        return f"speculation does not pay here: the best, {name}, is {gain} plain decoding"
    return f"{name} is {gain} plain decoding{_cost(row)}"


def _cost(row: Row) -> str:
    """Say what a drafted token and a verify pass cost, in steps of the target."""
    share, gamma = row.draft_steps, row.configuration.gamma
    if share is None:
        return ""
    drafted = f"; a drafted token costs {share:.1%} of a target step"
    width = "a draft" if gamma == AUTO else f"{gamma + 1} tokens"
    return f"{drafted} and verifying {width} {row.verify_steps:.2f} steps"


def _auto(autos: list[Row], fixed: list[Row]) -> str:
    """Hold the gamma policy to the best that any fixed gamma reached."""
    auto = max(autos, key=lambda row: row.overall)
    best = max(fixed, key=lambda row: row.overall)
    return (
        f"over the whole run {auto.configuration} is {auto.overall:.2f}x and the best fixed, "
        f"{best.configuration}, {best.overall:.2f}x"
    )


def _fallback(row: Row) -> str:
    """Say how often a limit was crossed."""
    off = sum(s.counts.fallback is not None for s in row.samples)
    return (
        f"{row.configuration} fell back in {off} of {len(row.samples)} completions: "
        f"{row.counts.fallback}"
    )
