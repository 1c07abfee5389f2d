"""The `--gamma` option: a whole number, or auto."""

from __future__ import annotations

from typing import Any

import click

from specrt.models import AUTO, Gamma


class GammaType(click.ParamType):  # type: ignore[type-arg]
    """Reads a gamma from the command line."""

    name = "gamma"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """Name what is expected; click would make capitals of it."""
        return "N|auto"

    def convert(self, value: Any, param: Any, ctx: Any) -> Gamma:
        """Return the number, or `auto`."""
        if value == AUTO or type(value) is int:
            return value  # type: ignore[no-any-return]
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor auto", param, ctx)
