"""Large bodies: read and checked in a thread, while the event loop goes on."""

from __future__ import annotations

import re
from asyncio import to_thread
from collections.abc import Callable
from typing import Any, Protocol

from starlette.exceptions import HTTPException

LARGE = 64 << 10
"""Bytes. Smaller ones are read before a thread would have begun."""

MOST_VALUES = 150_000
"""Lists, objects and fields of a body. Python reads JSON in one piece, in which no other thread
runs; these take 1 us each."""

_OPENING = re.compile(rb'"(?:[^"\\]+|\\.)*"|[\[{:]', re.DOTALL)


class BodyField(Protocol):
    """The parameter of a route that is its body, as FastAPI has it."""

    def validate(
        self, value: Any, *, loc: tuple[int | str, ...]
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Return the value in the parameter's type, and errors."""


async def read_body(body: bytes, read: Callable[[bytes], Any], field: BodyField | None) -> Any:
    """Return the JSON of a body; of a large one that is right, in the type of its parameter.

    Raises: HTTPException for one of too many values, and what `read` raises.
    """
    return read(body) if len(body) < LARGE else await to_thread(_checked, body, read, field)


def _checked(body: bytes, read: Callable[[bytes], Any], field: BodyField | None) -> Any:
    _check_count(body)
    given = read(body)
    if field is None:
        return given
    value, errors = field.validate(given, loc=("body",))
    return given if errors else value  # FastAPI finds the errors again, and tells them


def _check_count(body: bytes) -> None:
    if sum(map(body.count, (b"[", b"{", b":"))) <= MOST_VALUES:
        return  # with those within texts
    count = 0
    for found in _OPENING.finditer(body):
        count += not found[0].startswith(b'"')
        if count > MOST_VALUES:
            raise HTTPException(
                413, f"the body has more than {MOST_VALUES} lists, objects and fields; send less"
            )
