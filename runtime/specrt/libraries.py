"""Libraries that are installed under more than one name."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
"""Packages that bring ONNX Runtime; a machine has one of them."""


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return those of the packages that are installed, and their versions, importing none."""
    from importlib import metadata  # slow to import

    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def version(names: Iterable[str]) -> str | None:
    """Return the version of a library by the first of its names that is installed."""
    return next(iter(installed(names).values()), None)
