"""A token's bias on the command line: `ID=NUMBER`."""

from __future__ import annotations

from typing import Any

import click


class BiasType(click.ParamType):  # type: ignore[type-arg]
    """Reads `ID=NUMBER`, such as `50=-2.5`."""

    name = "id=number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Return the token id and what is added to its score."""
        token, _, number = str(value).partition("=")
        try:
            return int(token), float(number)
        except ValueError:
            self.fail(f"{value!r} is no bias; expected a token id and a number, as 50=-2.5")
