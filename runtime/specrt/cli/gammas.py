"""The `--gammas` option that several verbs share."""

from __future__ import annotations

from specrt.errors import RequestError
from specrt.models import AUTO, Gamma


def parse_gammas(text: str) -> list[Gamma]:
    """Read a list of gammas that `auto` may be among, as 0,2,4,auto.

    Raises: RequestError for anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        return list(dict.fromkeys(AUTO if part == AUTO else int(part) for part in parts))
    except ValueError:
        raise RequestError(
            f"--gammas is {text!r}; expected numbers and auto, as 0,2,4,auto"
        ) from None
