"""Equivalence: a portable graph computes what its model does, and an engine what its graph does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.engine.protocol import ConditionedEngine, Engine, Feed, Output, PackedEngine
from specrt.errors import BuildError, ExportError
from specrt.geometry import TAKEN_BACK, Geometry
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.scored_entries import model_entries
from specrt_export.checkpoint.task import SPEECH, ModelTask
from specrt_export.compile.compiler import KV_BYTES
from specrt_export.compile.tensorrt_compiler import LoweredEngine
from specrt_export.portable.graph import (
    PASS_BYTES,
    GraphRun,
    Logits,
    SourceGeometry,
    Tokens,
    padded,
)

TOLERANCES = {"fp32": 2e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Largest error of a logit over the spread of its row, by what an engine computes in. fp32 sums in
another order, which gives 1e-6; fp16 rounds by up to 5e-4, bf16 by up to 4e-3; a pass rounds a few
times a layer, in all directions. Seen: 8e-4 and 1e-3 on codelet's eight layers, 2e-3 and 1.4e-2 on
random models whose scores hang on every bit. A wrong rotation, length or scale moves logits by a
tenth of the spread and more."""

FAR_BYTES = 1 << 30
"""Most memory that the portable graph's KV buffers take for passes at the end of the context."""

_FAR_AND_NEAR = (300, 5, 33, 16)
"""Positions of sources: beyond near distances, few, and about whole groups of cross keys."""

_RAGGED = 4
"""Lengths that rows of a batch have."""

_RAGGED_PASSES = 6
"""Passes of some of the rows."""

_SHARE_ERROR = 1e-3


def check_engine(
    reference: GraphRun, engine: Engine, widths: Sequence[int], compute: str, name: str
) -> float:
    """Run an engine and its portable graph on the same tokens; return the largest relative error.

    Of a target with a head, features are compared as logits are.

    A prefill that reaches past every sliding window of up to 512 positions, then each width twice,
    the second time over stale keys. A lowered graph goes on at the end of the context, over copies
    of the keys written so far. Rows of a batch are at lengths of their own; an engine that packs
    them also runs passes of some rows, each as wide as it is. Rows of an encoder-decoder are texts
    of sources of different lengths, and read others before the passes of some of them.
    Raises: BuildError above the tolerance of `compute`, or where argmax, confidence or candidates
    are not those of the logits next to them.
    """
    comparison = _Comparison(reference, engine, compute, name)
    near = passes(engine.geometry, engine.max_length, widths)
    reach = max(start + width for start, width in near)
    if isinstance(engine, LoweredEngine):
        reach = reachable(engine, reach)
    reference.reset(engine.batch, reach)
    shape = engine.batch, reach
    tokens = np.random.default_rng(0).integers(0, engine.geometry.vocab_size, shape)
    comparison.condition(_FAR_AND_NEAR)
    errors = [comparison.run(tokens, at) for at in _fitting(near, engine.max_width)]
    if isinstance(engine, LoweredEngine):
        filled = near[0][1]
        far = sorted(reach - width for width in widths)
        reference.repeat(filled, far[0])
        engine.repeat(filled, far[0])
        errors += [comparison.run(tokens, (start, reach - start)) for start in far]
    if isinstance(engine, PackedEngine):
        comparison.condition(_FAR_AND_NEAR[::-1])
        errors += comparison.run_ragged(engine, reach, max(widths))
    return max(errors)


def _fitting(passes: Sequence[tuple[int, int]], widest: int) -> Iterator[tuple[int, int]]:
    """Yield passes (start, width), those that are too wide cut into several."""
    for start, width in passes:
        for at in range(0, width, widest):
            yield start + at, min(widest, width - at)


def max_width(geometry: Geometry, max_length: int, widths: Sequence[int]) -> int:
    """Return the width of the widest pass that `check_engine` runs."""
    return max(width for _, width in passes(geometry, max_length, widths))


def passes(geometry: Geometry, max_length: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, width) of each pass: past the windows, then each width twice.

    The second time goes back to the positions of the first, over stale keys.
    """
    prefill = max(1, min(past_windows(geometry), max_length - max(widths)))
    starts = {width: min(prefill, max_length - width) for width in widths}
    passes = [(starts[width], width) for width in widths for _ in range(2)]
    return [(0, prefill), *passes]


def past_windows(geometry: Geometry) -> int:
    """Return how many positions lie past every sliding window of up to 512, and in states.

    Going past wider ones takes too long; their layers are compared only within them.
    """
    windows = [w for w in geometry.windows if w <= 512]
    return max([TAKEN_BACK] * geometry.recurs + windows, default=0) + 24


def reachable(engine: Engine, least: int) -> int:
    """Return the length of buffers that the portable graph has memory for."""
    buffers = engine.geometry.buffers.values()
    position = sum(one.heads * one.width for one in buffers if not one.fixed)
    position *= engine.batch * KV_BYTES["fp32"]
    return min(engine.max_length, max(least, FAR_BYTES // position))


@dataclass(frozen=True)
class _Comparison:
    """Runs passes with both, and refuses the first that differs."""

    reference: GraphRun
    engine: Engine
    compute: str
    name: str

    def condition(self, lengths: Sequence[int]) -> None:
        """Read a random source for each row, of one length after another; of a decoder none."""
        source = self.reference.source
        if source is None:
            return
        assert isinstance(self.engine, ConditionedEngine), "an encoder-decoder reads sources"
        limits = replace(
            source.geometry, max_source=min(source.geometry.max_source, self.engine.max_source)
        )
        rows = [lengths[row % len(lengths)] for row in range(self.engine.batch)]
        sources = random_sources(limits, rows, encodes=source.encodes)
        self.reference.condition(sources)
        for row, one in enumerate(sources):
            self.engine.condition(row, one)

    def run(self, tokens: Tokens, at: tuple[int, int]) -> float:
        """Run one pass (start, width), each row from a start of its own; return the error."""
        start, width = at
        starts = [start - row % min(_RAGGED, start + 1) for row in range(len(tokens))]
        piece = np.stack([t[s : s + width] for t, s in zip(tokens, starts, strict=True)])
        scored = min(width, self._scored())
        rows, features = range(width - scored, width), self.engine.traits.features
        if features is None:
            expected = self.reference(piece, starts, rows)[0]
            return self._error(expected, self.engine.forward(piece, starts, scored), start, width)
        wanted = ("logits", "argmax", "feature")
        expected, _, left = self.reference.outputs(wanted, piece, starts, rows)
        error = self._error(expected, self.engine.forward(piece, starts, scored), start, width)
        found = np.stack([f[s : s + width] for f, s in zip(features, starts, strict=True)])
        return max(error, self._feature_error(left, found, start, width))

    def run_ragged(self, engine: PackedEngine, reach: int, widest: int) -> list[float]:
        """Run passes of some rows, of different widths, from where each of them is rolled back to.

        The reference runs all rows equally wide: what it writes beyond a row is overwritten before
        it is read, as each row goes on where its own tokens end.
        """
        rng, errors, batch = np.random.default_rng(1), [], engine.batch
        widest = min(widest, self._scored(), reach)
        # A row goes back as far as its layers remember.
        least = [min(engine.traits.rewind(row), reach - widest) for row in range(batch)]
        lengths = rng.integers(least, reach - widest + 1, batch)
        for _ in range(_RAGGED_PASSES):
            rows = np.flatnonzero(rng.random(batch) < 0.7).tolist() or [0]
            piece = rng.integers(0, engine.geometry.vocab_size, (batch, widest))
            feeds = []
            for row in rng.permutation(rows).tolist():
                width = int(rng.integers(1, widest + 1))
                feeds.append(Feed(row, piece[row, :width].tolist(), int(lengths[row]), width))
            expected = self.reference(piece, lengths.tolist(), range(widest))[0]
            for feed, output in zip(feeds, engine.forward_rows(feeds), strict=True):
                expected_row = expected[feed.row : feed.row + 1, : feed.rows]
                errors.append(self._error(expected_row, output, feed.start, feed.rows))
                lengths[feed.row] = min(feed.start + feed.rows, reach - widest)
        return errors

    def _scored(self) -> int:
        """Return how many positions of every row are scored in a pass."""
        return max(1, PASS_BYTES // (4 * self.engine.batch * self.engine.geometry.vocab_size))

    def _error(self, expected: Logits, output: Output, start: int, width: int) -> float:
        error = float(np.abs(output.logits - expected).max()) / (float(np.ptp(expected)) or 1.0)
        tolerance, place = TOLERANCES[self.compute], f"at position {start}, width {width}"
        if not error <= tolerance:  # also when either is not a number
            raise BuildError(
                f"the {self.name} engine differs from the portable graph by {error:.1e} of the "
                f"spread of the logits {place}; expected below {tolerance:.0e}. "
                f"{_OVERFLOW if self.compute == 'fp16' else _DEFECT}"
            )
        wrong = misread(output, self.reference.entries)
        if wrong:
            raise BuildError(f"the {self.name} engine has a wrong {wrong} {place}. {_DEFECT}")
        return error

    def _feature_error(
        self, expected: Logits, found: NDArray[np.float32], start: int, width: int
    ) -> float:
        """Compare what a target leaves for its head, as a part of the largest number of it."""
        error = float(np.abs(found - expected).max()) / (float(np.abs(expected).max()) or 1.0)
        tolerance = TOLERANCES[self.compute]
        if not error <= tolerance:
            raise BuildError(
                f"the {self.name} engine leaves features that differ from the portable graph by "
                f"{error:.1e} of the largest at position {start}, width {width}; expected below "
                f"{tolerance:.0e}. {_DEFECT}"
            )
        return error


_DEFECT = "This is a defect of the lowering: please report the architecture"

_OVERFLOW = "In fp16 the model may overflow: build with precision bf16"


def misread(output: Output, entries: Tokens | None) -> str:
    """Name what a graph reads from its logits wrongly; empty where all is right.

    `entries` are the ids that the logits are of, where these are not all.
    """
    logits = output.logits.astype(np.float64)
    best_ids = logits.argmax(-1)
    if (output.argmax != (best_ids if entries is None else entries[best_ids])).any():
        return "argmax"
    if output.confidence is not None:
        shares = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
        if not np.allclose(output.confidence, shares, atol=_SHARE_ERROR):
            return "confidence"
    if output.candidates is None:
        return ""
    scores, ids = output.candidates
    best = -np.sort(-output.logits, axis=-1)[..., : scores.shape[-1]]
    named = np.take_along_axis(output.logits, ids, axis=-1)
    right = np.array_equal(scores, best) and np.array_equal(named, best)
    return "" if right and _apart(ids) else "list of candidates"


def _apart(ids: NDArray[np.int64]) -> bool:
    """Tell whether no row names an id twice."""
    return bool((np.diff(np.sort(ids, axis=-1), axis=-1) > 0).all())


class Reference:
    """The checkpoint as transformers runs it: fp32, eager attention, no cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        import torch

        from specrt_export.checkpoint.task import task_of
        from specrt_export.portable.trace import quiet

        entries = model_entries(checkpoint)
        task = task_of(checkpoint.config)
        assert task is not None, "a checkpoint that has a graph is for something"
        self.task = task
        if checkpoint.coded or entries is not None:
            self.model = _filled(checkpoint, task, None if entries is None else len(entries))
            return
        with quiet(), no_progress_bar():
            loaded: Any = task.loader(str(checkpoint.config["model_type"])).from_pretrained(
                checkpoint.folder,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
            )
        self.model = loaded.eval()

    def __call__(self, tokens: Tokens) -> Logits:
        """Return the logits [B, S, V] of whole sequences [B, S]."""
        import torch

        return self._logits(input_ids=torch.from_numpy(tokens))

    def of(self, sources: Sequence[NDArray[Any]]) -> Callable[[Tokens], Logits]:
        """Return the same for sequences that are texts of sources; see `SourceRun`."""
        import torch

        if not self.task.encodes:
            hidden = torch.from_numpy(np.stack(sources))
            return lambda tokens: self._logits(
                input_ids=torch.from_numpy(tokens), encoder_outputs=(hidden,)
            )
        if self.task.name == SPEECH:
            given = {"input_features": torch.from_numpy(np.stack(sources))}
        else:
            lengths = torch.tensor([len(one) for one in sources]).unsqueeze(1)
            ids = torch.from_numpy(padded(sources))
            given = {"input_ids": ids, "attention_mask": torch.arange(ids.shape[1]) < lengths}
        return lambda tokens: self._logits(decoder_input_ids=torch.from_numpy(tokens), **given)

    def _logits(self, **given: Any) -> Logits:
        import torch

        with torch.no_grad():
            logits: Logits = self.model(**given, use_cache=False).logits.numpy()
        return logits


def _filled(checkpoint: Checkpoint, task: ModelTask, scored: int | None) -> Any:
    """Return the model of a checkpoint that transformers does not load itself.

    Codes become the floats that they stand for; of a draft of some entries, so many are `scored`.
    """
    import torch
    from transformers import AutoConfig

    from specrt_export.portable.fake_model import stored_names
    from specrt_export.portable.trace import project_on, quiet

    with quiet(), no_progress_bar(), torch.no_grad():
        config = AutoConfig.from_pretrained(checkpoint.folder)
        model = task.loader(str(checkpoint.config["model_type"])).from_config(
            getattr(config, "text_config", config),
            dtype=torch.float32,
            attn_implementation="eager",
        )
        names: dict[str, str] = {}
        if scored is not None:
            project_on(model, scored)
            names, _ = stored_names(model)
        _untie(model, checkpoint)
        for name, parameter in model.named_parameters():
            if _is_computed(model, name):
                continue
            parameter.copy_(torch.from_numpy(checkpoint.floats(names.get(name, name))))
        for name, buffer in model.named_buffers():
            if name in checkpoint.weights:
                buffer.copy_(torch.from_numpy(checkpoint.floats(name)))
    return model.eval()


def _untie(model: Any, checkpoint: Checkpoint) -> None:
    """Give a tied weight that a checkpoint holds under both names two parameters."""
    from torch.nn import Parameter

    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and {other, name} <= checkpoint.weights.keys():
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, Parameter(parameter.clone()))


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


def _is_computed(model: Any, name: str) -> bool:
    """Tell whether a parameter is a table of positions that a model makes, as Marian does."""
    return hasattr(model.get_submodule(name.rpartition(".")[0]), "create_weight")


PARITY_TOLERANCE = 1e-4
"""Largest error of a logit, as a part of the largest logit of the reference.

Two correct fp32 implementations differ only by the order of their sums: 1e-7 for small models,
about 1e-5 after a hundred layers. A wrong mask, offset or rope moves logits by 1e-2 and more.
"""

PREFIX, VERIFIED, STALE = 16, 3, 5
"""Tokens prefilled, tokens verified at once after them, and tokens rolled back."""

SHORT, FAR = (5, 11), 300
"""Positions of two sources, and of a text and a source that reach beyond near distances."""

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
    checkpoint: Checkpoint, graph: Path, *, tolerance: float = PARITY_TOLERANCE,
    reach: int = REACH, reference: Reference | None = None, folder: Path | None = None,
) -> ParityReport:  # fmt: skip
    """Run graph and model on the same random tokens; return how close their logits are.

    The graph's weights are in `folder`, or the checkpoint's own.

    Cases: prefill; a verify at an offset; two rows of different lengths, one rolled back over
    stale keys; beyond each sliding window of at most `reach` tokens. Rows of an encoder-decoder
    are texts of sources of different lengths; one more case is far into long ones.
    Raises: ExportError if an error, or an argmax that is not a near-tie, exceeds the tolerance.
    """
    run = GraphRun(graph, folder or checkpoint.folder)
    reference = Reference(checkpoint) if reference is None else reference
    compare = _Cases(tolerance, run.entries)
    if run.source is not None:
        _compare_conditioned(run, run.source.geometry, reference, compare)
        report = ParityReport(tuple(compare.cases), tolerance, ())
        _check_report(report, graph)
        return report
    windows = sorted(run.geometry.windows - {0})
    reachable = [w for w in windows if w + PAST_WINDOW <= min(reach, run.geometry.max_positions)]
    _compare_short(run, reference, compare)
    for window in reachable:
        _compare_beyond(run, reference, compare, window)
    unreached = tuple(window for window in windows if window not in reachable)
    report = ParityReport(tuple(compare.cases), tolerance, unreached)
    _check_report(report, graph)
    return report


def _compare_conditioned(
    run: GraphRun, source: SourceGeometry, reference: Reference, compare: _Cases
) -> None:
    """Compare texts of two sources of different lengths, then of others, beyond near distances."""
    encodes = reference.task.encodes
    # Some models take it for no token, and number those after it as if it were not there.
    compare.padding = padding = reference.model.config.pad_token_id
    sources = [_without(padding, one) for one in random_sources(source, SHORT, encodes=encodes)]
    run.condition(sources)
    _compare_short(run, reference.of(sources), compare)
    far = random_sources(source, (FAR, FAR // 3), encodes=encodes)
    sources = [_without(padding, one) for one in far]
    run.condition(sources)
    length = min(FAR, run.geometry.max_positions)
    last = min(PAST_WINDOW, length // 2)
    tokens = compare.tokens(run, length, 4)
    run.reset(batch=2, length=length)
    run(tokens[:, : length - last], [0, 0], range(1))
    # One row at the end of its text, the other back in the middle, over keys that are its own.
    start = [length - last, length // 2 - last]
    piece = np.stack([tokens[row, at : at + last] for row, at in enumerate(start)])
    expected = reference.of(sources)(tokens)
    expected = np.stack([expected[row, at : at + last] for row, at in enumerate(start)])
    compare("far", run(piece, start, range(last)), expected)


def random_sources(
    source: SourceGeometry, lengths: Sequence[int], *, encodes: bool
) -> list[NDArray[Any]]:
    """Return sources of up to so many positions; hidden states where nothing encodes them."""
    rng, most = np.random.default_rng(3), source.max_source
    if source.vocab_size and encodes:
        return [rng.integers(0, source.vocab_size, min(length, most)) for length in lengths]
    shapes = [(source.features, source.frames)] * len(lengths)
    if not encodes:
        ends = [min(length, most) if source.vocab_size else most for length in lengths]
        shapes = [(end, source.width) for end in ends]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _compare_short(run: GraphRun, reference: Callable[[Tokens], Logits], compare: _Cases) -> None:
    """Prefill, verify at an offset, then roll row 0 back and go on with rows of two lengths."""
    tokens = compare.tokens(run, PREFIX + VERIFIED + STALE)
    drafted = tokens.copy()
    # Row 0 holds other tokens where it will be rolled back, so that its stale keys are wrong.
    drafted[0, PREFIX - STALE :] = compare.tokens(run, VERIFIED + 2 * STALE, 2)[0]
    expected, width = reference(drafted), PREFIX
    run.reset(batch=2, length=tokens.shape[1] + CHUNK)
    output = run(drafted[:, :width], [0, 0], range(width))
    compare("prefill", output, expected[:, :width])
    output = run(drafted[:, width : width + VERIFIED], [width, width], range(VERIFIED))
    compare("offset", output, expected[:, width : width + VERIFIED])
    start = [PREFIX - STALE, PREFIX + VERIFIED]
    ragged = np.stack([tokens[row, at : at + STALE] for row, at in enumerate(start)])
    expected = reference(tokens)
    expected = np.stack([expected[row, at : at + STALE] for row, at in enumerate(start)])
    compare("rollback", run(ragged, start, range(STALE)), expected)


def _compare_beyond(run: GraphRun, reference: Reference, compare: _Cases, window: int) -> None:
    """Feed chunks until queries have left the first keys behind."""
    tokens = compare.tokens(run, window + PAST_WINDOW)[:1]
    expected = reference(tokens)
    run.reset(batch=1, length=tokens.shape[1])
    for start in range(0, tokens.shape[1], CHUNK):
        chunk = tokens[:, start : start + CHUNK]
        rows = range(max(0, chunk.shape[1] - PAST_WINDOW), chunk.shape[1])
        output = run(chunk, [start], rows)
    compare(f"window {window}", output, expected[:, -len(rows) :])


def _without(padding: int | None, source: NDArray[Any]) -> NDArray[Any]:
    """Return token ids with another in the place of padding; features as they are."""
    if padding is None or source.dtype.kind != "i":
        return source
    return np.where(source == padding, padding - 1 if padding else 1, source)


class _Cases:
    """Gathers cases."""

    def __init__(self, tolerance: float, entries: Tokens | None) -> None:
        self.tolerance = tolerance
        self.entries = entries
        self.padding: int | None = None
        self.cases: list[Case] = []

    def tokens(self, run: GraphRun, length: int, seed: int = 1) -> Tokens:
        """Return random texts of two rows, without padding where a model is told of it."""
        drawn = np.random.default_rng(seed).integers(0, run.geometry.vocab_size, (2, length))
        return _without(self.padding, drawn)

    def __call__(self, name: str, output: tuple[Logits, Tokens], expected: Logits) -> None:
        """Compare logits and argmax [B, R] with the reference's logits [B, R, V]."""
        logits, ids = output
        argmax = ids if self.entries is None else np.searchsorted(self.entries, ids)
        scale = float(np.abs(expected).max()) or 1.0
        best = np.sort(expected, axis=-1)
        # The reference's distance from its best logit to the one the graph chose.
        chosen = np.take_along_axis(expected, argmax[..., None], axis=-1)[..., 0]
        lost = (best[..., -1] - chosen) / scale
        chosen_by = logits.argmax(-1)
        own = np.array_equal(ids, chosen_by if self.entries is None else self.entries[chosen_by])
        error = float(np.abs(logits - expected).max()) / scale
        self.cases.append(
            Case(
                name=name,
                rows=argmax.size,
                error=error if np.isfinite(error) else float("inf"),
                argmax_equal=int((argmax == expected.argmax(-1)).sum()),
                margin=float((best[..., -1] - best[..., -2]).min()) / scale,
                explained=own and bool((lost <= 2 * self.tolerance).all()),
            )
        )


def _check_report(report: ParityReport, graph: Path) -> None:
    for case in report.cases:
        if case.error > report.tolerance or not case.explained:
            raise ExportError(
                f"{graph} disagrees with the model at {case.name!r}: error {case.error:.1e} of "
                f"the largest logit, tolerance {report.tolerance:.1e}; argmax equal in "
                f"{case.argmax_equal} of {case.rows} rows. Do not use this graph; report the "
                "model's config.json"
            )
