"""The options that keep a text to a structure, for the commands that have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from specrt.errors import RequestError
from specrt.prompts import read_text

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--json-schema",
        metavar="F",
        help="Keep to a JSON Schema: a file, the schema itself, or true for any JSON.",
    ),
    click.option("--regex", help="Keep to a regular expression, from beginning to end."),
    click.option("--choice", multiple=True, help="Take one of these texts; repeat for each."),
    click.option(
        "--grammar",
        type=click.Path(path_type=Path),
        metavar="F",
        help="Keep to the Lark or GBNF grammar of a file.",
    ),
)


def structured(command: F) -> F:
    """Give a command the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_structured(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options out of a command's, as `SamplingParams` names and takes them.

    Raises: RequestError for a file that cannot be read.
    """
    schema, choice = options.pop("json_schema"), options.pop("choice")
    grammar: Path | None = options.pop("grammar")
    return {
        "json_schema": None if schema is None else read_schema(schema),
        "regex": options.pop("regex"),
        "choice": choice or None,
        "grammar": None if grammar is None else read_text(grammar),
    }


def read_schema(given: str) -> str:
    """Return a schema's text: what was given where it is one, else what the file holds."""
    if not given.strip():
        raise RequestError("--json-schema is empty; expected a file, a schema, or true")
    written_out = given.lstrip().startswith("{") or given.strip() in ("true", "false")
    return given if written_out else read_text(Path(given))
