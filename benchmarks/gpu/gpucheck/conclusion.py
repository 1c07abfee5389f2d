"""What a run says at its end: what failed, the figures that are wanted, tokens per second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpucheck.evidence import FAILED, NOT_RUN, OK, Facts, Outcome
from gpucheck.steps import BACKENDS

MOST_NAMED = 3
"""How many steps that ended alike are listed by name."""


def figures(steps: Mapping[str, Any]) -> list[Facts]:
    """Compare what was measured of the 8 B fp16 target with what is wanted of a data-centre GPU.

    One of each for every backend that measured any; a value is None where it was not measured.
    """
    measured = {}
    for backend in BACKENDS:
        parts = [steps.get(f"8B-fp16.{name}@{backend}", {}) for name in ("passes", "speed")]
        measured[backend] = [one["facts"] if one.get("status") == OK else {} for one in parts]
    measured = {name: parts for name, parts in measured.items() if any(parts)} or {"": [{}, {}]}
    return [one for backend, parts in measured.items() for one in _figures(backend, *parts)]


def _figures(backend: str, passes: Facts, speed: Facts) -> Iterator[Facts]:
    for name, value, bound, least in (
        ("plain decoding, of the bandwidth bound", _of_bound(passes, speed), 0.75, True),
        ("verify pass at gamma 4, over a decode pass", _verify(passes), 1.15, False),
        ("waiting for the host, of a round at gamma 4", _host_share(speed), 0.03, False),
        ("speculation over plain, best gamma", _speedup(speed), 2.5, True),
    ):
        met = None if value is None else value >= bound if least else value <= bound
        wanted = f"{'>=' if least else '<='} {bound:g}"
        yield {
            "name": f"8B fp16 {name}", "backend": backend, "wanted": wanted, "value": value,
            "met": met,
        }  # fmt: skip


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
    return round(max(0.0, 1 - 1e3 * float(alone["median"]) / float(speed["4"]["round_us"])), 4)


def _speedup(speed: Facts) -> float | None:
    gammas = [float(one["speedup"]) for key, one in speed.items() if key.isdigit() and key != "0"]
    return max(gammas, default=None)


def summary(outcomes: Sequence[Outcome], steps: Mapping[str, Any], out: Path) -> str:
    """Return what failed, what did not run and why, the figures, and tokens per second."""
    rows = [("figure", "backend", "wanted", "measured", "met")]
    for one in figures(steps):
        value = "not measured" if one["value"] is None else f"{one['value']:.3f}"
        met = {None: "-", True: "yes", False: "no"}[one["met"]]
        rows.append((one["name"], one["backend"] or "-", one["wanted"], value, met))
    counts = [f"{sum(o.status == s for o in outcomes)} {s}" for s in (OK, FAILED, NOT_RUN)]
    speeds = list(_speeds(steps))
    parts = [
        "\n".join([*_alike(outcomes, FAILED), *_alike(outcomes, NOT_RUN)]),
        _aligned(rows),
        f"{', '.join(counts)}\nresults: {out}",
        _aligned([("tokens per second", "plain", "best", "gamma"), *speeds]) if speeds else "",
    ]
    return "\n\n".join(filter(None, parts))


def _alike(outcomes: Sequence[Outcome], status: str) -> list[str]:
    """Return a line for each reason why steps ended so."""
    reasons: dict[str, list[str]] = {}
    for one in outcomes:
        if one.status == status:
            reasons.setdefault(one.reason, []).append(one.key)
    return [
        f"{', '.join(keys) if len(keys) <= MOST_NAMED else f'{len(keys)} steps'} {status}: {reason}"
        for reason, keys in reasons.items()
    ]


def _speeds(steps: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield what was measured of each pair, also by steps that failed later."""
    for key, entry in steps.items():
        rates = {
            name: one["tokens_per_second"]
            for name, one in entry.get("facts", {}).items()
            if isinstance(one, dict) and "tokens_per_second" in one
        }
        if ".speed@" in key and "0" in rates:
            best = max(rates, key=lambda gamma: float(rates[gamma]))
            yield key, f"{rates['0']:.0f}", f"{rates[best]:.0f}", best


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
