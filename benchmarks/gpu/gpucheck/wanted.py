"""The figures that are wanted on a data-centre GPU, and what was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gpucheck.step import OK, Facts

Steps = dict[str, Any]
BACKENDS = ("tensorrt", "tensorrt-rtx", "ort-cuda")


@dataclass(frozen=True)
class Figure:
    """One figure of one backend."""

    name: str
    backend: str
    wanted: str
    found: float | None
    """None where it was not measured."""
    met: bool | None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return asdict(self)


def figures(steps: Steps) -> list[Figure]:
    """Hold what was measured to what is wanted, for every backend that measured any of it."""
    found = [one for backend in BACKENDS for one in _of(steps, backend)]
    return found or [_figure(*row) for row in _rows(None, None, "")]


def _of(steps: Steps, backend: str) -> list[Figure]:
    passes, bench = (_facts(steps, f"8B-fp16.{part}@{backend}") for part in ("passes", "bench"))
    if passes is None and bench is None:
        return []
    return [_figure(*row) for row in _rows(passes, bench, backend)]


def _rows(
    passes: Facts | None, bench: Facts | None, backend: str
) -> list[tuple[str, str, float | None, float, bool]]:
    return [
        ("plain 8B fp16, of the bandwidth bound", backend, _of_bound(passes, bench), 0.75, True),
        (
            "8B fp16 verify pass at gamma 4, over a decode pass",
            backend,
            _verify(passes),
            1.15,
            False,
        ),
        ("8B fp16 host time, of a round at gamma 4", backend, _host(bench), 0.03, False),
        ("8B fp16 speculation over plain, best gamma", backend, _speedup(bench), 2.5, True),
    ]


def _figure(name: str, backend: str, found: float | None, bound: float, least: bool) -> Figure:
    met = None if found is None else found >= bound if least else found <= bound
    return Figure(name, backend, f"{'>=' if least else '<='} {bound:g}", found, met)


def _facts(steps: Steps, key: str) -> Facts | None:
    step = steps.get(key)
    found: Facts | None = step["facts"] if step and step["status"] == OK else None
    return found


def _of_bound(passes: Facts | None, bench: Facts | None) -> float | None:
    """Return tokens a second of plain decoding over those that reading the weights allows."""
    if passes is None or "bound_ms" not in passes or bench is None:
        return None
    return round(float(bench["0"]["tokens_per_second"]) * float(passes["bound_ms"]) / 1e3, 4)


def _verify(passes: Facts | None) -> float | None:
    if passes is None:
        return None
    ratios = passes.get("device_verify_over_decode") or passes["host_verify_over_decode"]
    found: float | None = ratios.get("5")
    return found


def _host(bench: Facts | None) -> float | None:
    """Return the part of a round in which the device waits for the host.

    Of whole rounds: what is left of a round when the same rounds, launched back to back, are taken
    off. Else what is outside both engines.
    """
    if bench is None or "4" not in bench:
        return None
    alone = bench.get("device_round_ms", {}).get("4")
    if alone is None:
        return float(bench["4"]["outside_share"])
    busy_us = float(alone["median"]) * 1e3
    return round(max(0.0, 1 - busy_us / float(bench["4"]["round_us"])), 4)


def _speedup(bench: Facts | None) -> float | None:
    if bench is None:
        return None
    drafting = [one for key, one in bench.items() if key.isdigit() and key != "0"]
    return max((float(one["speedup"]) for one in drafting), default=None)
