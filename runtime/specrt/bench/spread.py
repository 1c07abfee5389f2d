"""Medians and how far apart the values around them are. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """The median of some values, and the quartiles around it: half of them lie between."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value or more."""
        return cls(quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75))

    def to_json(self, digits: int = 4) -> dict[str, Any]:
        """Return the three numbers by name."""
        return {name: round(value, digits) for name, value in self._asdict().items()}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the others lie, on the line between neighbours.

    Source: definition 7 of Hyndman and Fan 1996, NumPy's default.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
