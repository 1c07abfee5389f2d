"""The `--gammas` option that several verbs share."""

from __future__ import annotations

from specrt.errors import RequestError


def parse_gammas(text: str) -> list[int]:
    """Read a list of gammas, as 0,2,4.

    Raises: RequestError for anything but whole numbers.
    """
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise RequestError(f"--gammas is {text!r}; expected numbers, as 0,2,4") from None
