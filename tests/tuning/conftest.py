"""A clock that only stands where it was put."""

from __future__ import annotations

import pytest


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def move(self, ns: int) -> None:
        self.now += ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the rounds."""
    made = Clock()
    monkeypatch.setattr("specrt.speculation.round.perf_counter_ns", made)
    return made
