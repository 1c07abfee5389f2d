"""The package that runs everything on a GPU, and a double of the machine it runs on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpucheck.settings import RunSettings

from gpu.gpu_double import GpuDouble


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    """Little to do, in a folder of its own."""
    return RunSettings(
        work=tmp_path, sizes=("1B",), precisions=("fp16",), gammas=(1, 4), prompts=1, tokens=12,
        laps=1, copied_bytes=1 << 16,
    )  # fmt: skip


@pytest.fixture
def double(settings: RunSettings) -> Iterator[GpuDouble]:
    """A machine with a GPU in NumPy; at the end every device was closed and emptied."""
    machine = GpuDouble(settings)
    yield machine
    assert all(device.closed == 1 and not device.leaked for device in machine.devices)
