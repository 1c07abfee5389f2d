"""Files of a build: whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrt.engine.tensorrt.library import FLAVOURS
from specrt.errors import BuildError
from specrt_export.compile.plan_builder import TimingCache
from specrt_export.portable.external_data import atomic_file

RTX, ENTERPRISE = "tensorrt-rtx", "tensorrt"


def library(backend: str, module: Any = None) -> Any:
    return SimpleNamespace(backend=backend, module=module, flavour=FLAVOURS[backend])


def write(place: Path, data: bytes, error: BaseException | None = None) -> None:
    with atomic_file(place) as file:
        file.write(data)
        if error is not None:
            raise error


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "plan"
    with pytest.raises(ZeroDivisionError):
        write(place, b"half", ZeroDivisionError())
    assert list(place.parent.iterdir()) == []
    write(place, b"whole")
    assert place.read_bytes() == b"whole"
    with pytest.raises(BuildError, match="could not be written"):
        write(place, b"half", OSError(errno.ENOSPC, "No space left on device"))
    assert [path.read_bytes() for path in place.parent.iterdir()] == [b"whole"]


class Timings:
    """A library that times kernels: what it was given, and what it knows after."""

    def __init__(self, takes: bool) -> None:
        self.given: list[bytes] = []
        self._takes = takes

    def create_timing_cache(self, data: bytes) -> bytes:
        self.given.append(data)
        return data

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        return self._takes or not cache

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.given[-1] + b"+")


def test_timings_are_kept_beside_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "model.timing"
    for expected, note in ((b"+", "begun"), (b"++", "read and kept")):
        cache, config = TimingCache(library(ENTERPRISE), path), Timings(takes=True)
        cache.attach(config)
        cache.keep(config)
        assert (path.read_bytes(), cache.note) == (expected, note)
    other = TimingCache(library(ENTERPRISE), path)
    config = Timings(takes=False)
    other.attach(config)
    other.keep(config)
    assert config.given == [b"++", b""]
    assert path.read_bytes() == b"+"
    assert "of another version or GPU" in other.note


def test_a_library_that_times_nothing_keeps_nothing(tmp_path: Path) -> None:
    cache = TimingCache(library(RTX), tmp_path / "model.timing")
    cache.attach(None)
    cache.keep(None)
    assert cache.note.startswith("none: tensorrt-rtx times kernels on the device")
    assert list(tmp_path.iterdir()) == []
