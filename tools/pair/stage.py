"""The stages of training, and the options they share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """What one stage trains: the model's name and shape, and its peak learning rates."""

    model: str
    width: int
    layers: int
    muon: float
    adam: float


@dataclass(frozen=True)
class Options:
    """The options of `train`; its help says what they are."""

    out: Path
    init: Path | None
    minutes: float
    deadline: datetime | None
    steps: int
    batch: int
    window: int
    seed: int
    muon: float | None
    adam: float | None
    hold: float
    width: int | None
    layers: int | None
    save_every: float
    tests: int
    device: str
