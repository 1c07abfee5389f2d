"""Numbers of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrt.errors import CheckpointError


def whole_number(
    config: Mapping[str, Any], key: str, where: Path, default: int | None = None, *, least: int = 1
) -> int:
    """Return a number of a config.json, or the default where it is left out.

    Raises: CheckpointError for what is not a whole number, or is too small.
    """
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise CheckpointError(
            f"{where}: {key} is {value!r}; expected a whole number from {least}: fetch the "
            "checkpoint again"
        )
    return value
