"""Hold a graph lowered for TensorRT to the portable graph that it came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrt.engine import Output
from specrt.errors import BuildError
from specrt_export.compile.halved import TOLERANCES, passes
from specrt_export.compile.lowered_engine import LoweredEngine
from specrt_export.portable import GraphRun, Tokens
from specrt_export.quality import PASS_BYTES

FAR_BYTES = 1 << 30
"""Most memory that the portable graph's KV buffers take for passes at the end of the context."""

_RAGGED = 4
"""Lengths that rows of a batch have."""

_SHARE_ERROR = 1e-3

_DEFECT = "This is a defect of the lowering: please report the architecture"
_OVERFLOW = "In fp16 the model may overflow: build with precision bf16"


def hold_lowered(
    reference: GraphRun, engine: LoweredEngine, widths: Sequence[int], compute: str, name: str
) -> float:
    """Run both through the same passes; return the largest error of a logit over the spread.

    Past the windows, each width twice, then each width once more at the end of the context, over
    copies of the keys written so far. Rows of a batch are at lengths of their own.
    Raises: BuildError above the tolerance, or where argmax, confidence or candidates are not those
    of the logits beside them.
    """
    near = passes(reference.geometry, engine.max_length, widths)
    reach = _reach(reference, engine, max(start + width for start, width in near))
    reference.reset(batch=engine.batch, length=reach)
    shape = engine.batch, reach
    tokens = np.random.default_rng(0).integers(0, reference.geometry.vocab_size, shape)
    errors = [_compare(reference, engine, tokens, at, compute, name) for at in near]
    filled = near[0][1]
    reference.repeat(filled)
    engine.repeat(filled)
    for width in widths:
        far = reach - width, width
        errors.append(_compare(reference, engine, tokens, far, compute, name))
    return max(errors)


def _reach(reference: GraphRun, engine: LoweredEngine, least: int) -> int:
    """Return the length of buffers that the portable graph has memory for."""
    one = reference.geometry
    position = 2 * 4 * engine.batch * one.layers * one.kv_heads * one.head_dim
    return min(engine.max_length, max(least, FAR_BYTES // position))


def _compare(
    reference: GraphRun, engine: LoweredEngine, tokens: Tokens, at: tuple[int, int], compute: str,
    name: str,
) -> float:  # fmt: skip
    start, width = at
    starts = [start - row % min(_RAGGED, start + 1) for row in range(len(tokens))]
    piece = np.stack([t[s : s + width] for t, s in zip(tokens, starts, strict=True)])
    scored = min(width, max(1, PASS_BYTES // (4 * len(tokens) * reference.geometry.vocab_size)))
    expected = reference(piece, starts, range(width - scored, width))[0]
    found = engine.forward(piece, starts, scored)
    error = float(np.abs(found.logits - expected).max()) / (float(np.ptp(expected)) or 1.0)
    place = f"at position {start}, width {width}"
    if not error <= TOLERANCES[compute]:  # also when either is not a number
        raise BuildError(
            f"the graph lowered for {name} differs from the portable graph by {error:.1e} of the "
            f"spread of the logits {place}; expected below {TOLERANCES[compute]:.0e}. "
            f"{_OVERFLOW if compute == 'fp16' else _DEFECT}"
        )
    wrong = _misread(found)
    if wrong:
        raise BuildError(
            f"the graph lowered for {name} says a wrong {wrong} of its logits {place}. {_DEFECT}"
        )
    return error


def _misread(found: Output) -> str:
    """Name what a graph reads from its logits wrongly; empty where all is right."""
    logits = found.logits.astype(np.float64)
    if (found.argmax != logits.argmax(-1)).any():
        return "argmax"
    if found.confidence is not None:
        shares = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
        if not np.allclose(found.confidence, shares, atol=_SHARE_ERROR):
            return "confidence"
    if found.candidates is None:
        return ""
    scores, ids = found.candidates
    best = -np.sort(-found.logits, axis=-1)[..., : scores.shape[-1]]
    named = np.take_along_axis(found.logits, ids, axis=-1)
    right = np.array_equal(scores, best) and np.array_equal(named, best)
    return "" if right and _apart(ids) else "list of candidates"


def _apart(ids: NDArray[np.int64]) -> bool:
    """Tell whether no row names an id twice."""
    return bool((np.diff(np.sort(ids, axis=-1), axis=-1) > 0).all())
