"""The package of the script that runs everything on a GPU, and a place for it to work in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(GPU))

from gpucheck.place import Place  # noqa: E402


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A place with little to do."""
    return Place(work=tmp_path, sizes=(), gammas=(1, 4), prompts=1, tokens=12, laps=1)
