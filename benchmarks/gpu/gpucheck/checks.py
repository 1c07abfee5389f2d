"""What every engine is held to, whatever its backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpucheck.passes import (
    Open,
    Pass,
    Reference,
    alive,
    feed,
    fitted,
    most_rows,
    relative,
    require_same,
    run_shapes,
    text,
)
from gpucheck.step import CheckError, Facts
from specrt.engine.protocol import Engine
from specrt.errors import EngineError

TOLERANCES = {"fp32": 2e-4, "fp16": 1e-2, "bf16": 5e-2, "int8": 1e-2, "int4": 1e-2, "fp8": 1e-2}
"""Largest error of a logit over the spread of its row, against fp32 on a CPU with the same stored
weights; whole numbers and fp8 are multiplied with fp16 activations."""


def logits(engine: Engine, reference: Reference, tolerance: float) -> Facts:
    """Hold logits to a reference, pass by pass.

    Raises: CheckError above the tolerance.
    """
    shapes = fitted(engine)
    tokens = text(engine, sum(width for width, _ in shapes))
    found = run_shapes(engine, tokens, shapes)
    alive(found)
    reference.reset(1, tokens.shape[1])
    worst: dict[str, float] = {}
    at = ties = 0
    for one, (width, rows) in zip(found, shapes, strict=True):
        piece = tokens[:, at : at + width]
        wanted, best = reference(piece, [at], range(width - rows, width))
        name = f"{width}x{rows}"
        worst[name] = max(worst.get(name, 0.0), relative(one.logits, wanted))
        ties += int((one.argmax != best).sum())
        at += width
    facts: Facts = {
        "tolerance": tolerance,
        "largest_relative_error": max(worst.values()),
        "by_shape": worst,
        "argmax_that_differ": ties,
        "rows": sum(rows for _, rows in shapes),
    }
    if not facts["largest_relative_error"] <= tolerance:
        raise CheckError(
            f"logits are {facts['largest_relative_error']:.1e} of their spread away from the "
            f"reference; expected at most {tolerance:.0e}", facts,
        )  # fmt: skip
    return facts


def replays(open_engine: Open) -> Facts:
    """Hold passes that replay a CUDA graph to the same launched kernel by kernel."""
    runs = []
    for capture in (True, False):
        engine = open_engine(capture)
        try:
            shapes = fitted(engine)
            tokens = text(engine, sum(width for width, _ in shapes))
            runs.append(run_shapes(engine, tokens, shapes))
        finally:
            engine.close()
    alive(runs[0])
    return require_same(runs[0], runs[1], "replayed and launched passes")


def rollback(open_engine: Open) -> Facts:
    """Hold passes over stale keys to the same in a fresh engine."""
    engine = open_engine(True)
    fresh = engine
    try:
        fresh = open_engine(True)
        tokens, junk = text(engine, 40), text(engine, 40, seed=1)
        start = min(16, engine.max_width)
        for one in (engine, fresh):
            feed(one, tokens[:, :start], 0, 1)
        for at in (start, start + 4):
            feed(engine, junk[:, :9], at)
            feed(engine, junk[:, :1], at + 9)
        found: list[Pass] = []
        wanted: list[Pass] = []
        at = start
        for width in (5, 1, 5, 9):
            piece = tokens[:, at : at + width]
            found.append(feed(engine, piece, at))
            wanted.append(feed(fresh, piece, at))
            at += width
        alive(wanted)
        return require_same(found, wanted, "passes over stale keys and fresh ones")
    finally:
        engine.close()
        fresh.close()


def limit(engine: Engine, reference: Reference, tolerance: float) -> Facts:
    """Fill the buffers to the last position, in odd widths at the end, and go over it.

    Raises: CheckError where scores are off, or a write past the end is not refused.
    """
    length, step = engine.max_length, min(64, engine.max_width)
    widths = [w for w in (7, 5, 3, 2, 1) if w <= engine.max_width]
    tail = sum(widths)
    tokens = text(engine, length)
    reference.reset(1, length)
    at = 0
    while at < length - tail:
        width = min(step, length - tail - at)
        feed(engine, tokens[:, at : at + width], at, 1)
        reference(tokens[:, at : at + width], [at], [width - 1])
        at += width
    worst, shapes = 0.0, []
    for number, width in enumerate(widths):
        rows = min(width if number % 2 == 0 else max(1, width // 2), most_rows(engine))
        piece = tokens[:, at : at + width]
        found = feed(engine, piece, at, rows)
        wanted, _ = reference(piece, [at], range(width - rows, width))
        worst = max(worst, relative(found.logits, wanted))
        shapes.append([width, rows])
        at += width
    facts = {"length": length, "passes": shapes, "largest_relative_error": worst}
    if not worst <= tolerance:
        raise CheckError(f"scores near the limit are {worst:.1e} of their spread off", facts)
    return {**facts, "refused": _refusals(engine, tokens)}


def _refusals(engine: Engine, tokens: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> list[str]:
    """Try what would write past the end; the last pass must give the same afterwards."""
    length, said = engine.max_length, []
    before = feed(engine, tokens[:, -1:], length - 1)
    for width, start in ((2, length - 1), (1, length), (1, -1)):
        try:
            engine.forward(tokens[:, :width], start)
        except EngineError as error:
            said.append(str(error))
            continue
        raise CheckError(
            f"a pass of width {width} at {start} of {length} positions was not refused"
        )
    require_same([feed(engine, tokens[:, -1:], length - 1)], [before], "passes before and after")
    return said


def memory(open_engine: Open, free: Callable[[], int], slack: int, turns: int = 3) -> Facts:
    """Open, use and close an engine several times; the device must be as empty as after the first.

    The first time also loads what the process keeps: kernels, the library's own memory.
    Raises: CheckError where memory is not given back.
    """
    first, least, left = free(), [], []
    for _ in range(1 + turns):
        engine = open_engine(True)
        try:
            shapes = fitted(engine)
            run_shapes(engine, text(engine, sum(w for w, _ in shapes)), shapes)
            least.append(free())
        finally:
            engine.close()
        left.append(free())
    facts = {
        "free_before": first, "free_while_open": least, "free_after_close": left, "slack": slack,
    }  # fmt: skip
    lost = left[0] - min(left)
    if lost > slack:
        raise CheckError(f"{lost} bytes were not given back in {turns} turns", facts)
    if not min(least) < left[0]:
        raise CheckError("an open engine took no memory, so nothing was checked", facts)
    return facts
