"""Numbers on the command line: read as click reads them, refused in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from reprlib import repr as short
from typing import Any

import click
from click.types import FloatParamType, IntParamType


class Number(click.ParamType):  # type: ignore[type-arg]
    """Reads a finite number of one of click's types, which may have bounds."""

    def __init__(self, read: IntParamType | FloatParamType) -> None:
        self._read = read
        self.name = "n" if isinstance(read, IntParamType) else "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number; what is refused is named with its option and what was expected."""
        try:
            number = self._read.convert(value, param, ctx)
            if math.isfinite(number):
                return number
        except (click.BadParameter, OverflowError):
            pass
        raise click.UsageError(f"{param.opts[0]} is {_shown(value)}; expected {self._expected()}")

    def _expected(self) -> str:
        """Describe the numbers that are taken, in words."""
        bounds = self._read
        kind = "a whole number" if isinstance(bounds, IntParamType) else "a finite number"
        least, most = (getattr(bounds, name, None) for name in ("min", "max"))
        if least is None:
            return kind
        if getattr(bounds, "min_open", False):
            return f"{kind} above {least}" + ("" if most is None else f", up to {most}")
        return f"{kind} of {least} or more" if most is None else f"{kind} from {least} to {most}"


def in_plain_words(parameters: Iterable[click.Parameter]) -> None:
    """Let the numbers among a command's parameters be read by `Number`."""
    for parameter in parameters:
        if isinstance(parameter.type, (IntParamType, FloatParamType)):
            parameter.type = Number(parameter.type)


def _shown(value: Any) -> str:
    """Return a value as it was typed, in quotes where it is not a number."""
    try:
        float(value)
    except ValueError:
        return short(value)
    return short(value).strip("'")
