"""Shared by the fixtures of several folders: the repository, and files that all workers see."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder of this run that all its workers see."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock that other processes wait for."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def nightly_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of parameters, all but those kept for every run marked `nightly`."""
    often, nightly = list(kept), pytest.mark.nightly
    return [
        one
        if one in often
        else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=nightly)
        for one in values
    ]
