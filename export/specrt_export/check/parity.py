"""Compares a portable graph with the transformers model it was traced from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specrt.errors import ExportError
from specrt_export.checkpoint import Checkpoint
from specrt_export.portable.graph import GraphRun, Logits, Tokens
from specrt_export.portable.trace import quiet


class Reference:
    """The checkpoint as transformers runs it: fp32, eager attention, no cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import AutoModelForCausalLM

        with quiet(), no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
            )
        self._model = loaded.eval()

    def __call__(self, tokens: Tokens) -> Logits:
        """Return the logits [B, S, V] of whole sequences [B, S]."""
        with torch.no_grad():
            output = self._model(input_ids=torch.from_numpy(tokens), use_cache=False)
        logits: Logits = output.logits.numpy()
        return logits


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing a bar of its own."""
    from transformers.utils import logging

    switch: Any = logging
    shown = switch.is_progress_bar_enabled()
    switch.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            switch.enable_progress_bar()


TOLERANCE = 1e-4
"""Largest error of a logit, as a part of the largest logit of the reference.

Two correct fp32 implementations differ only by the order of their sums: 1e-7 for small models,
about 1e-5 after a hundred layers. A wrong mask, offset or rope moves logits by 1e-2 and more.
"""

PREFIX, VERIFIED, STALE = 16, 3, 5
"""Tokens prefilled, tokens verified at once after them, and tokens rolled back."""

CHUNK, PAST_WINDOW, REACH = 128, 8, 640
"""Widest pass, tokens fed beyond a window, and the most tokens a check feeds."""


@dataclass(frozen=True)
class Case:
    """One comparison of logits, over `rows` rows of a vocabulary."""

    name: str
    rows: int
    error: float
    """Largest absolute difference over the largest absolute reference logit."""
    argmax_equal: int
    margin: float
    """Smallest distance between the reference's two best logits, on the scale of `error`."""
    explained: bool
    """Whether every differing argmax is a tie within the tolerance."""


@dataclass(frozen=True)
class ParityReport:
    """What was compared, and how close it came."""

    cases: tuple[Case, ...]
    tolerance: float
    unreached: tuple[int, ...]
    """Windows longer than a check goes; their layers were compared only within them."""

    @property
    def error(self) -> float:
        """The largest error of all cases."""
        return max(case.error for case in self.cases)


def check_parity(
    checkpoint: Checkpoint, graph: Path, *, tolerance: float = TOLERANCE, reach: int = REACH
) -> ParityReport:
    """Run graph and model on the same random tokens; return how close their logits are.

    Cases: prefill; a verify at an offset; two rows of different lengths, one rolled back over
    stale keys; beyond each sliding window of at most `reach` tokens.
    Raises: ExportError if an error, or an argmax that is no near-tie, exceeds the tolerance.
    """
    run, reference = GraphRun(graph, checkpoint.folder), Reference(checkpoint)
    windows = sorted(set(run.geometry.windows) - {0})
    reachable = [w for w in windows if w + PAST_WINDOW <= min(reach, run.geometry.max_positions)]
    compare = _Comparison(tolerance)
    _short(run, reference, compare)
    for window in reachable:
        _beyond(run, reference, compare, window)
    unreached = tuple(window for window in windows if window not in reachable)
    report = ParityReport(tuple(compare.cases), tolerance, unreached)
    _hold(report, graph)
    return report


def _short(run: GraphRun, reference: Reference, compare: _Comparison) -> None:
    """Prefill, verify at an offset, then roll row 0 back and go on with rows of two lengths."""
    tokens = _tokens(run.geometry.vocab_size, PREFIX + VERIFIED + STALE)
    drafted = tokens.copy()
    # Row 0 holds other tokens where it will be rolled back, so that its stale keys are wrong.
    drafted[0, PREFIX - STALE :] = _tokens(run.geometry.vocab_size, VERIFIED + 2 * STALE, 2)[0]
    wanted, width = reference(drafted), PREFIX
    run.reset(batch=2, length=tokens.shape[1] + CHUNK)
    made = run(drafted[:, :width], [0, 0], range(width))
    compare("prefill", made, wanted[:, :width])
    made = run(drafted[:, width : width + VERIFIED], [width, width], range(VERIFIED))
    compare("offset", made, wanted[:, width : width + VERIFIED])
    start = [PREFIX - STALE, PREFIX + VERIFIED]
    ragged = np.stack([tokens[row, at : at + STALE] for row, at in enumerate(start)])
    wanted = reference(tokens)
    wanted = np.stack([wanted[row, at : at + STALE] for row, at in enumerate(start)])
    compare("rollback", run(ragged, start, range(STALE)), wanted)


def _beyond(run: GraphRun, reference: Reference, compare: _Comparison, window: int) -> None:
    """Feed chunks until queries have left the first keys behind."""
    tokens = _tokens(run.geometry.vocab_size, window + PAST_WINDOW)[:1]
    wanted = reference(tokens)
    run.reset(batch=1, length=tokens.shape[1])
    for start in range(0, tokens.shape[1], CHUNK):
        chunk = tokens[:, start : start + CHUNK]
        rows = range(max(0, chunk.shape[1] - PAST_WINDOW), chunk.shape[1])
        made = run(chunk, [start], rows)
    compare(f"window {window}", made, wanted[:, -len(rows) :])


def _tokens(vocab_size: int, length: int, seed: int = 1) -> Tokens:
    return np.random.default_rng(seed).integers(0, vocab_size, (2, length))


class _Comparison:
    """Gathers cases."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.cases: list[Case] = []

    def __call__(self, name: str, made: tuple[Logits, Tokens], wanted: Logits) -> None:
        """Compare logits and argmax [B, R] with the reference's logits [B, R, V]."""
        logits, argmax = made
        scale = float(np.abs(wanted).max()) or 1.0
        best = np.sort(wanted, axis=-1)
        # The reference's distance from its best logit to the one the graph chose.
        chosen = np.take_along_axis(wanted, argmax[..., None], axis=-1)[..., 0]
        lost = (best[..., -1] - chosen) / scale
        own = np.array_equal(argmax, logits.argmax(-1))
        error = float(np.abs(logits - wanted).max()) / scale
        self.cases.append(
            Case(
                name=name,
                rows=argmax.size,
                error=error if np.isfinite(error) else float("inf"),
                argmax_equal=int((argmax == wanted.argmax(-1)).sum()),
                margin=float((best[..., -1] - best[..., -2]).min()) / scale,
                explained=own and bool((lost <= 2 * self.tolerance).all()),
            )
        )


def _hold(report: ParityReport, graph: Path) -> None:
    for case in report.cases:
        if case.error > report.tolerance or not case.explained:
            raise ExportError(
                f"{graph} disagrees with the model at {case.name!r}: error {case.error:.1e} of "
                f"the largest logit, tolerance {report.tolerance:.1e}; argmax equal in "
                f"{case.argmax_equal} of {case.rows} rows. Do not use this graph; report the "
                "model's config.json"
            )
