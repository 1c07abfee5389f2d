"""Texts that go through an engine in passes of many widths, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gpucheck.step import CheckError, Facts
from specrt.engine.protocol import Engine

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]
Open = Callable[[bool], Engine]
"""Opens the engine under test; its passes are captured where that is asked for."""

SHAPES = ((60, 1), (1, 1), (1, 1), (5, 5), (9, 9), (5, 5), (2, 1), (64, 1), (1, 1), (9, 9))
"""(width, rows): prefills, and verification widths more than once, so that replays are among
them."""


class Reference(Protocol):
    """What an engine is held to; `specrt_export.portable.graph.GraphRun` is one."""

    def reset(self, batch: int, length: int) -> None:
        """Start over."""

    def __call__(
        self, tokens: Ids, start: Sequence[int], rows: Sequence[int]
    ) -> tuple[Scores, Ids]:
        """Feed tokens; return logits and argmax of the rows asked for."""


class Pass(NamedTuple):
    """What a pass gave, copied."""

    logits: Scores
    argmax: Ids


def text(engine: Any, count: int, seed: int = 0) -> Ids:
    """Return tokens [1, count] that the engine knows."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, engine.geometry.vocab_size, (1, count))


def most_rows(engine: Any) -> int:
    """Return how many rows a pass may score; the plan of a draft scores one."""
    record = getattr(getattr(engine, "model", None), "record", None)
    if record is None:
        return int(engine.max_width)
    return max(int(profile.rows.most) for profile in record.profiles)


def feed(engine: Engine, tokens: Ids, start: int, rows: int | None = None) -> Pass:
    """Run a pass and copy what it gave; of all rows, or as many as may be, when none are named."""
    rows = min(tokens.shape[1], most_rows(engine)) if rows is None else rows
    done = engine.forward(tokens, start, rows)
    return Pass(np.array(done.logits), np.array(done.argmax))


def fitted(engine: Engine) -> list[tuple[int, int]]:
    """Return the shapes of passes that an engine takes, within its length."""
    shapes, used = [], 0
    for wanted, rows in SHAPES:
        width = min(wanted, engine.max_width)
        if used + width <= engine.max_length:
            shapes.append((width, min(rows, width, most_rows(engine))))
            used += width
    return shapes


def run_shapes(engine: Engine, tokens: Ids, shapes: Sequence[tuple[int, int]]) -> list[Pass]:
    """Put a text through, pass after pass."""
    at, found = 0, []
    for width, rows in shapes:
        found.append(feed(engine, tokens[:, at : at + width], at, rows))
        at += width
    return found


def alive(passes: Sequence[Pass]) -> None:
    """Refuse scores that a device which computes nothing would give.

    Raises: CheckError.
    """
    for number, one in enumerate(passes):
        if not np.isfinite(one.logits).all():
            raise CheckError(f"pass {number} gave scores that are no numbers")
        if float(np.ptp(one.logits)) <= 1e-3:
            raise CheckError(f"pass {number} gave scores that are all alike")
        if not np.array_equal(one.argmax, one.logits.argmax(-1)):
            raise CheckError(f"pass {number} gave an argmax that is not the first best score")


def require_same(found: Sequence[Pass], wanted: Sequence[Pass], what: str) -> Facts:
    """Hold passes to others bit for bit.

    Raises: CheckError with how far apart they are.
    """
    apart = [float(np.abs(f.logits - w.logits).max()) for f, w in zip(found, wanted, strict=True)]
    facts = {"passes": len(found), "largest_difference": max(apart, default=0.0)}
    equal = all(
        np.array_equal(f.logits, w.logits) and np.array_equal(f.argmax, w.argmax)
        for f, w in zip(found, wanted, strict=True)
    )
    if not equal:
        raise CheckError(f"{what} differ by up to {facts['largest_difference']:.2e}", facts)
    return facts


def relative(found: Scores, wanted: Scores) -> float:
    """Return the largest error as a part of the spread of the scores."""
    return float(np.abs(found - wanted).max()) / (float(np.ptp(wanted)) or 1.0)
