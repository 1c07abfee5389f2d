"""A tuning is kept whole or not at all, and trusted only where it was measured."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from specrt.bundle import Bundle, read_manifest
from specrt.engine.backends import backend_named
from specrt.errors import BundleError
from specrt.params import AUTO
from specrt.speculation.costs import Costs
from specrt.system.machine import this_machine
from specrt.tuning.tuning_record import (
    FILE_NAME,
    FORMAT,
    TunedSetting,
    Tuning,
    check_writable,
    read_tuning,
    write_tuning,
)

THREADS = 2
ROW = TunedSetting("cascade", None, 400, 5_000_000_000, 200, 500, 300, 200)


@pytest.fixture
def bundle(tmp_path: Path, codelet: Path) -> Bundle:
    """A bundle of which nothing but the manifest is looked at."""
    return Bundle(tmp_path, read_manifest(codelet))


@pytest.fixture
def tuning(bundle: Bundle) -> Tuning:
    widths = range(max(bundle.manifest.gammas) + 1)
    return Tuning(
        format=FORMAT, date="2026-11-21", source=bundle.manifest.source,
        machine=this_machine(backend_named(bundle.manifest.backend).library()),
        threads=THREADS, pools=1, verify_ns=tuple(1000 + 10 * g for g in widths),
        draft_ns=tuple(100 * g for g in widths), outside_ns=50, fixed_gamma=None, drafter="cascade",
        settings=(TunedSetting("none", 0, 400, 10_000_000_000, 400, 0, 0, 0), ROW),
    )  # fmt: skip


def ignored(bundle: Bundle, threads: int = THREADS) -> str:
    """Return why a tuning is not used: one line that says what to run."""
    found, notice = read_tuning(bundle, threads)
    assert found is None
    assert notice is not None
    assert "\n" not in notice
    assert f"{bundle.path / FILE_NAME} " in notice
    assert f"; run `specrt tune {bundle.path}" in notice
    return notice


def inside(bundle: Bundle) -> list[str]:
    return [path.name for path in bundle.path.iterdir()]


def test_what_was_written_is_read(bundle: Bundle, tuning: Tuning) -> None:
    assert read_tuning(bundle, THREADS) == (None, None)
    assert write_tuning(bundle.path, tuning) == bundle.path / FILE_NAME
    assert read_tuning(bundle, THREADS) == (tuning, None)
    assert tuning.costs == Costs(
        tuple(1000.0 + 10 * g for g in range(9)), tuple(100.0 * g for g in range(9)), 50.0
    )
    assert tuning.gamma == AUTO
    assert replace(tuning, fixed_gamma=3).gamma == 3


def test_a_tuning_of_something_else_is_ignored(bundle: Bundle, tuning: Tuning) -> None:
    for stale, reason in (
        (replace(tuning, source="1" * 64), "built again"),
        (replace(tuning, machine=replace(tuning.machine, cpu="Abacus")), "(cpu Abacus, not "),
        (replace(tuning, machine=replace(tuning.machine, library="onnxruntime 0.1")), "0.1, not"),
    ):
        write_tuning(bundle.path, stale)
        assert reason in ignored(bundle)
    write_tuning(bundle.path, replace(tuning, pools=2))  # the pools it ran on do not matter
    assert read_tuning(bundle, THREADS)[1] is None
    assert "with 2 threads, not 997; run" in ignored(bundle, threads=997)
    assert f"{bundle.path} --threads 997`" in ignored(bundle, threads=997)


def test_damage_is_ignored_without_waiting(bundle: Bundle, tuning: Tuning) -> None:
    place = bundle.path / FILE_NAME
    wrong: tuple[dict[str, Any], ...] = (
        {"format": FORMAT + 1}, {"verify_ns": [1] * 8}, {"verify_ns": [1.5] * 9},
        {"draft_ns": [1] * 9}, {"draft_ns": [0] * 9}, {"outside_ns": 10**400}, {"threads": 0},
        {"pools": 3}, {"fixed_gamma": 99}, {"drafter": "oracle"}, {"source": "line\nline"},
        {"settings": [{"drafter": "model"}]}, {"settings": [{**asdict(ROW), "decode_ns": 0}]},
    )  # fmt: skip
    number = b'{"format": 1' + b"1" * 5000 + b"}"
    for content in (
        b"", b"[]", b"\xff\xfe", b"[" * 100_000, number, b" " * (1 << 21),
        *(json.dumps({**asdict(tuning), **changes}).encode() for changes in wrong),
    ):  # fmt: skip
        place.write_bytes(content)
        assert "damaged" in ignored(bundle), content[:99]
    place.unlink()
    os.mkfifo(place)
    assert "not a file" in ignored(bundle)


no_room = Mock(side_effect=OSError(28, "No space left on device"))


@pytest.mark.parametrize("verb", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_old_record_and_nothing_else(
    bundle: Bundle, tuning: Tuning, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    write_tuning(bundle.path, tuning)
    with monkeypatch.context() as broken:
        broken.setattr(verb, no_room)
        with pytest.raises(BundleError, match=r"No space left.*make .* writable.*copy the bundle"):
            write_tuning(bundle.path, replace(tuning, drafter="model"))
    assert read_tuning(bundle, THREADS) == (tuning, None)
    assert inside(bundle) == [FILE_NAME]


def test_an_unwritable_place_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(bundle.path)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(BundleError, match="may not be written to"):
        check_writable(bundle.path)
    assert inside(bundle) == []
