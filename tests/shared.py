"""Shared by the fixtures of several folders: the repository, and files that all workers see."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
