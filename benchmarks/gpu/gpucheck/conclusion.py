"""What a run says at its end: tables of steps, of speed, and of the figures that are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpucheck.evidence import FAILED, NOT_RUN, OK, Facts, Outcome
from gpucheck.orders import BACKENDS

MOST_NAMED = 3
"""How many steps that were not run for one reason are listed by name."""
WIDEST = 100


@dataclass(frozen=True)
class Figure:
    """One figure of the 8 B fp16 target on a data-centre GPU, and whether it is reached."""

    name: str
    backend: str
    wanted: str
    value: float | None
    """None where it was not measured."""
    met: bool | None

    def to_json(self) -> Facts:
        """Return it as plain JSON types."""
        return asdict(self)


def figures(steps: dict[str, Any]) -> list[Figure]:
    """Compare what was measured with what is wanted, for every backend that measured any of it."""
    rows = [figure for backend in BACKENDS for figure in _of_backend(steps, backend)]
    return rows or list(_figures({}, {}, ""))


def _of_backend(steps: dict[str, Any], backend: str) -> Iterator[Figure]:
    parts = [steps.get(f"8B-fp16.{name}@{backend}", {}) for name in ("passes", "speed")]
    passes, speed = (part["facts"] if part.get("status") == OK else {} for part in parts)
    if passes or speed:
        yield from _figures(passes, speed, backend)


def _figures(passes: Facts, speed: Facts, backend: str) -> Iterator[Figure]:
    wanted = (
        ("plain decoding, of the bandwidth bound", _of_bound(passes, speed), 0.75, True),
        ("verify pass at gamma 4, over a decode pass", _verify(passes), 1.15, False),
        ("waiting for the host, of a round at gamma 4", _host_share(speed), 0.03, False),
        ("speculation over plain, best gamma", _speedup(speed), 2.5, True),
    )
    for name, value, bound, least in wanted:
        met = None if value is None else value >= bound if least else value <= bound
        sign = ">=" if least else "<="
        yield Figure(f"8B fp16 {name}", backend, f"{sign} {bound:g}", value, met)


def _of_bound(passes: Facts, speed: Facts) -> float | None:
    """Return tokens a second of plain decoding over those that reading the weights allows."""
    if "bound_ms" not in passes or "0" not in speed:
        return None
    return round(float(speed["0"]["tokens_per_second"]) * float(passes["bound_ms"]) / 1e3, 4)


def _verify(passes: Facts) -> float | None:
    ratios = passes.get("device_verify_over_decode") or passes.get("host_verify_over_decode", {})
    value: float | None = ratios.get("5")
    return value


def _host_share(speed: Facts) -> float | None:
    """Return the part of a round in which the device waits for the host.

    Where whole rounds were timed back to back: what they leave of a round. Else what is outside
    both engines.
    """
    if "4" not in speed:
        return None
    alone = speed.get("device_round_ms", {}).get("4")
    if alone is None:
        return float(speed["4"]["outside_share"])
    busy_us = float(alone["median"]) * 1e3
    return round(max(0.0, 1 - busy_us / float(speed["4"]["round_us"])), 4)


def _speedup(speed: Facts) -> float | None:
    return max((float(o["speedup"]) for k, o in speed.items() if k.isdigit() and k != "0"),
               default=None)  # fmt: skip


def progress(outcome: Outcome) -> str:
    """Return how a step ended, to stand behind its name."""
    if outcome.status == NOT_RUN:
        return NOT_RUN
    text = f"{outcome.status}, {outcome.seconds:.1f} s"
    return f"{text}: {outcome.reason}" if outcome.reason else text


def summary(outcomes: Sequence[Outcome], data: dict[str, Any], out: Path) -> str:
    """Return what ran, what did not and why, the figures, and how many there are of each."""
    ran = [one for one in outcomes if one.status != NOT_RUN]
    parts = [_steps_table(ran)] if ran else []
    if len(ran) < len(outcomes):
        parts.append("\n".join(not_run(outcomes)))
    rows = [("figure", "backend", "wanted", "measured", "met")]
    for figure in figures(data["steps"]):
        value = "not measured" if figure.value is None else f"{figure.value:.3f}"
        met = {None: "-", True: "yes", False: "no"}[figure.met]
        rows.append((figure.name, figure.backend or "-", figure.wanted, value, met))
    parts.append(_aligned(rows))
    counts = [f"{sum(o.status == s for o in outcomes)} {s}" for s in (OK, FAILED, NOT_RUN)]
    parts.append(f"{', '.join(counts)}\nresults: {out}")
    return "\n\n".join(parts)


def not_run(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each reason why steps were not run."""
    reasons: dict[str, list[str]] = {}
    for one in outcomes:
        if one.status == NOT_RUN:
            reasons.setdefault(one.reason, []).append(one.key)
    return [
        f"{', '.join(keys) if len(keys) <= MOST_NAMED else f'{len(keys)} steps'} not run: {reason}"
        for reason, keys in reasons.items()
    ]


def _steps_table(outcomes: Sequence[Outcome]) -> str:
    rows = [("step", "status", "seconds", "what")]
    for one in outcomes:
        text = one.reason if one.status != OK else _headline(one.facts)
        text = text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
        rows.append((one.key, one.status, f"{one.seconds:.1f}", text))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _headline(facts: Facts) -> str:
    """Return what matters most of a step's facts."""
    if "bytes_per_second" in facts:
        return f"{facts['bytes_per_second'] / 1e9:.0f} GB/s"
    if "decode_of_bound" in facts:
        return f"decode at {facts['decode_of_bound']:.0%} of the bandwidth bound"
    if "largest_relative_error" in facts:
        return f"at most {facts['largest_relative_error']:.1e} of the spread off"
    if "captures" in facts:
        captures = facts["captures"]
        return f"CUDA graphs captured: {captures['captured']} ({captures['expected']} expected)"
    if "unexplained" in facts:
        return f"{facts['tokens']} tokens, {len(facts['divergences'])} near-ties"
    if "0" in facts:
        speeds = {k: v for k, v in facts.items() if "tokens_per_second" in (v or ())}
        best = max(speeds, key=lambda gamma: speeds[gamma]["tokens_per_second"])
        rate, speedup = speeds[best]["tokens_per_second"], speeds[best]["speedup"]
        plain = facts["0"]["tokens_per_second"]
        return f"plain {plain:.0f} tokens/s, gamma {best} {rate:.0f} ({speedup:.2f}x)"
    return ""
