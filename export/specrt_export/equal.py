"""Hold a compiled engine to the portable graph it came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx

from specrt.engine import Engine, Feed, PackedEngine, open_engine
from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt_export.compile.ort_cpu import ENGINE
from specrt_export.portable import GraphRun, Logits, Tokens, runs_here
from specrt_export.quality import PASS_BYTES

TOLERANCE = 2e-4
"""Largest error of a logit over the spread of its row; fp32 sums in another order give 1e-6."""

_RAGGED = 4
"""Lengths that rows of a batch have."""

_RAGGED_PASSES = 6
"""Passes of some of the rows."""

_FP32 = 1
"""MatMulNBits' `accuracy_level` of sums and activations in fp32; 4 has int8 activations."""


def check_equal(
    graph: Path, checkpoint: Path, engine: Path, geometry: Geometry, max_length: int,
    widths: list[int], batch: int = 1,
) -> float | None:  # fmt: skip
    """Run engine and portable graph on the same tokens; return the largest relative error.

    A prefill that reaches past every sliding window of up to 512 positions, then a pass of each
    width, then the same positions again over stale keys. Rows of a batch are at lengths of their
    own, and then take part in some passes and not in others, each as wide as it is. Products of
    quantized weights are computed in fp32 here: the engine itself rounds activations too, which
    would hide a defect of the lowering. Returns None where the ONNX Runtime installed is too old to
    run the portable graph.
    Raises: BuildError above the tolerance.
    """
    if not runs_here():
        return None
    plan = _plan(geometry, max_length, widths)
    reach = max(start + width for start, width in plan)
    reference = GraphRun(graph, checkpoint)
    reference.reset(batch, reach)
    tokens = np.random.default_rng(0).integers(0, geometry.vocab_size, (batch, reach))
    with exact(engine / ENGINE) as path:
        compiled = open_engine(
            "ort-cpu", path, geometry, batch=batch, max_length=max_length,
            max_width=max(width for _, width in plan), threads=1,
        )  # fmt: skip
        try:
            errors = [_compare(reference, compiled, tokens, start, width) for start, width in plan]
            if isinstance(compiled, PackedEngine):
                errors += _compare_ragged(reference, compiled, tokens, max(widths))
        finally:
            compiled.close()
    return max(errors)


def _compare(
    reference: GraphRun, compiled: Engine, tokens: Tokens, start: int, width: int
) -> float:
    """Run one pass with both; return the error, unless it is above the tolerance."""
    starts = [start - row % min(_RAGGED, start + 1) for row in range(len(tokens))]
    piece = np.stack([t[at : at + width] for t, at in zip(tokens, starts, strict=True)])
    scored = min(width, _most(compiled))
    expected = reference(piece, starts, range(width - scored, width))[0]
    return _error(expected, compiled.forward(piece, starts, scored).logits, start, width)


def _compare_ragged(
    reference: GraphRun, compiled: PackedEngine, tokens: Tokens, widest: int
) -> list[float]:
    """Run passes of some rows, of different widths, from where each of them is rolled back to.

    The reference runs all rows equally wide: what it writes beyond a row is overwritten before it
    is read, as each row goes on where its own tokens end.
    """
    rng, errors = np.random.default_rng(1), []
    batch, reach = tokens.shape
    widest = min(widest, _most(compiled), reach)
    lengths = rng.integers(0, reach - widest + 1, batch)
    for _ in range(_RAGGED_PASSES):
        fed = np.flatnonzero(rng.random(batch) < 0.7).tolist() or [0]
        piece = rng.integers(0, compiled.geometry.vocab_size, (batch, widest))
        feeds = []
        for row in rng.permutation(fed).tolist():
            width = int(rng.integers(1, widest + 1))
            feeds.append(Feed(row, piece[row, :width].tolist(), int(lengths[row]), width))
        expected = reference(piece, lengths.tolist(), range(widest))[0]
        for feed, made in zip(feeds, compiled.forward_rows(feeds), strict=True):
            wanted = expected[feed.row, : feed.rows]
            errors.append(_error(wanted, made.logits[0], feed.start, feed.rows))
            lengths[feed.row] = min(feed.start + feed.rows, reach - widest)
    return errors


def _most(compiled: Engine) -> int:
    """Return how many positions of every row are scored in a pass."""
    return max(1, PASS_BYTES // (4 * compiled.batch * compiled.geometry.vocab_size))


def _error(expected: Logits, found: Logits, start: int, width: int) -> float:
    """Return how far logits are from what was expected of them.

    Raises: BuildError above the tolerance.
    """
    spread = float(expected.max() - expected.min()) or 1.0
    error = float(np.abs(found - expected).max()) / spread
    if not error <= TOLERANCE:  # also when either is not a number
        raise BuildError(
            f"the compiled engine differs from the portable graph by {error:.1e} of the spread of "
            f"the logits at position {start}, width {width}; expected below {TOLERANCE:.0e}. This "
            "is a defect of the lowering: please report the architecture"
        )
    return error


@contextmanager
def exact(engine: Path) -> Iterator[Path]:
    """Give a copy of an engine that computes products of quantized weights in fp32.

    The copy reads the engine's own weights, and is gone afterwards.
    """
    model = onnx.load(engine, load_external_data=False)
    levels = [a for node in model.graph.node for a in node.attribute if a.name == "accuracy_level"]
    if not levels:
        yield engine
        return
    for level in levels:
        level.i = _FP32
    copy = engine.with_name("exact.onnx")
    copy.write_bytes(model.SerializeToString())
    try:
        yield copy
    finally:
        copy.unlink()


def past_windows(geometry: Geometry) -> int:
    """Return how many positions lie past every sliding window of up to 512.

    Going past wider ones takes too long; their layers are compared only within them.
    """
    return max((w for w in geometry.windows if w <= 512), default=0) + 24


def _plan(geometry: Geometry, max_length: int, widths: list[int]) -> list[tuple[int, int]]:
    """Return the (start, width) of each pass: past the windows, then each width twice."""
    prefill = max(1, min(past_windows(geometry), max_length - sum(widths)))
    passes = [(prefill + again * width, width) for width in widths for again in (0, 1)]
    return [(0, prefill), *((at, width) for at, width in passes if at + width <= max_length)]
