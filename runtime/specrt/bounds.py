"""Numbers of a JSON Schema that the compiler would not keep to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from reprlib import repr as short
from typing import Any, NamedTuple

from specrt.errors import RequestError

MOST = 1 << 53
"""Whole numbers above lose their last digits in the compiler."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class Bound(NamedTuple):
    """A bound of a number, and where it stands."""

    place: str
    word: str
    value: Fraction


def check_numbers(parts: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse numbers that are too large, and open bounds that would admit themselves.

    `parts` are all schemas within a schema, with their places. An open bound that is whole admits
    itself where another bound lies less than 1 away; in the same schema, or where schemas meet.
    Raises: RequestError.
    """
    for place, schema in parts:
        for word in (*BOUNDS, "multipleOf", "const", "enum"):
            for number in _numbers(schema.get(word)):
                if abs(number) > MOST:
                    raise RequestError(
                        f"json_schema has {word} {short(number)} at {place}; expected numbers up "
                        f"to {MOST}"
                    )
    meet = any("allOf" in schema or "$ref" in schema for _, schema in parts)
    each = [list(_bounds(place, schema)) for place, schema in parts]
    for bounds in [[b for own in each for b in own]] if meet else each:
        _check_open(bounds)


def _check_open(bounds: Sequence[Bound]) -> None:
    lows = [b for b in bounds if b.word in ("minimum", "exclusiveMinimum")]
    highs = [b for b in bounds if b.word in ("maximum", "exclusiveMaximum")]
    pairs = [(low, low.value, high.value) for low in lows for high in highs]
    pairs += [(high, low.value, high.value) for low in lows for high in highs]
    for bound, low, high in pairs:
        whole = bound.word.startswith("exclusive") and bound.value.denominator == 1
        if whole and low < high and high - low < 1:
            raise RequestError(
                f"json_schema has {bound.word} {float(bound.value):g} at {bound.place}, which "
                "cannot be enforced beside a bound less than 1 away; use one that is not whole"
            )


def _bounds(place: str, schema: Mapping[str, Any]) -> Iterator[Bound]:
    if schema.get("type") == "integer":
        return
    for word in BOUNDS:
        value = schema.get(word)
        if type(value) in (int, float):
            yield Bound(place, word, Fraction(str(value)))


def _numbers(value: Any) -> Iterator[int | float]:
    """Go through the numbers of a JSON value."""
    stack = [value]
    while stack:
        one = stack.pop()
        if type(one) in (int, float):
            yield one
        elif isinstance(one, Mapping):
            stack.extend(one.values())
        elif isinstance(one, list):
            stack.extend(one)
