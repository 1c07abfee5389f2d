"""How far a quantized model is from the one it was made from, and the gate it must pass."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx

from specrt.bundle import Agreement, Quality
from specrt.engine.protocol import ConditionedEngine, Engine, Feed, PackedEngine, Source
from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt_export.compile.compiler import GraphSource
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu, open_ort_cpu
from specrt_export.portable.external_data import external_tensors, location
from specrt_export.portable.graph import (
    PASS_BYTES,
    GraphRun,
    Logits,
    SourceRun,
    Tokens,
    divergences,
    parts_beside,
    read_graph,
    runs_here,
    scored_entries,
)
from specrt_export.quantize.quantizer import WEIGHTS, Quantized, graft
from specrt_export.quantize.weight_store import Stored
from specrt_export.recipe.recipe_tables import EngineOptions, QualityOptions

_ROWS = 16


class Scorer(Protocol):
    """A model that is fed one text at a time, from its beginning on."""

    geometry: Geometry

    def condition(self, source: Source) -> None:
        """Read the source of the text that follows; only of an encoder-decoder."""

    def __call__(self, tokens: Tokens, start: int) -> Logits:
        """Feed tokens [S] at `start`; return the logits [S, V] after each."""


class GraphScorer:
    """A portable graph as a scorer."""

    def __init__(self, run: GraphRun, length: int) -> None:
        self.geometry = run.geometry
        self._run = run
        self._length = length

    def condition(self, source: Source) -> None:
        """See `Scorer`."""
        self._run.condition([source])

    def __call__(self, tokens: Tokens, start: int) -> Logits:
        """See `Scorer`."""
        if start == 0:
            self._run.reset(batch=1, length=self._length)
        logits: Logits = self._run(tokens[None], [start], range(len(tokens)))[0][0]
        return logits


class EngineScorer:
    """A compiled engine as a scorer; of an engine of several rows that packs them, the first."""

    def __init__(self, engine: Engine) -> None:
        self.geometry = engine.geometry
        self._engine = engine

    def condition(self, source: Source) -> None:
        """See `Scorer`."""
        assert isinstance(self._engine, ConditionedEngine), "an encoder-decoder reads sources"
        self._engine.condition(0, source)

    def __call__(self, tokens: Tokens, start: int) -> Logits:
        """See `Scorer`."""
        if isinstance(self._engine, PackedEngine):
            width = self._engine.max_width
            return np.concatenate(
                [self._scored(tokens[at : at + width], start + at)
                 for at in range(0, len(tokens), width)]
            )  # fmt: skip
        batch = self._engine.batch  # other engines run all rows, here with the same tokens
        # Every row has logits of its own, so as many passes keep their memory the same.
        width = -(-len(tokens) // batch)
        rows = []
        for at in range(0, len(tokens), width):
            piece = np.broadcast_to(tokens[at : at + width], (batch, len(tokens[at : at + width])))
            rows.append(self._engine.forward(piece, [start + at] * batch).logits[0].copy())
        return np.concatenate(rows)

    def _scored(self, tokens: Tokens, start: int) -> Logits:
        """Return the logits after each of some tokens of the first row."""
        assert isinstance(self._engine, PackedEngine), "others run all rows"
        feed = Feed(0, tokens.tolist(), start, len(tokens))
        logits: Logits = self._engine.forward_rows([feed])[0].logits[0]
        return logits.copy()


def measure(reference: Scorer, quantized: Scorer, pieces: Sequence[Tokens]) -> Quality:
    """Score pieces with both models, position by position.

    `kl` is the mean over positions of the sum of p·log(p / q), in nats; p is the reference's
    distribution. `top1` is the share of positions where both have the same likeliest token.
    """
    return _compare(reference, quantized, pieces)[0]


@dataclass(frozen=True)
class Likeliest:
    """The likeliest token at each position of the pieces, by checkpoint and by engine."""

    checkpoint: Tokens
    engine: Tokens

    def of(self, entries: Tokens | None) -> Likeliest:
        """Return the ids of the entries that a model scores, where these are not all."""
        if entries is None:
            return self
        return Likeliest(entries[self.checkpoint], entries[self.engine])


def _compare(
    reference: Scorer, quantized: Scorer, pieces: Sequence[Tokens],
    sources: Sequence[Source] = (),
) -> tuple[Quality, Likeliest]:  # fmt: skip
    divergence, tops = 0.0, list[tuple[Tokens, Tokens]]()
    for piece, source in zip_longest(pieces, sources):
        for one, other in _both(reference, quantized, piece, source):
            divergence += float(divergences(one, other).sum())
            tops.append((one.argmax(-1), other.argmax(-1)))
    ours, theirs = (np.concatenate(side) for side in zip(*tops, strict=True))
    tokens, kl = len(ours), max(0.0, divergence / len(ours))
    quality = Quality(kl=kl, top1=float((ours == theirs).mean()), tokens=tokens)
    return quality, Likeliest(ours, theirs)


def acceptance(target: Likeliest, draft: Likeliest) -> Agreement | None:
    """Return how often a draft's token is the target's, before and after quantizing either.

    None where the pieces are not the same to both: a draft may know fewer tokens.
    """
    if len(target.engine) != len(draft.engine):
        return None
    before = float((target.checkpoint == draft.checkpoint).mean())
    return Agreement(before, float((target.engine == draft.engine).mean()))


def _both(
    reference: Scorer, quantized: Scorer, piece: Tokens, source: Source | None = None
) -> Iterator[tuple[Logits, Logits]]:
    """Yield a few rows of logits of both models at a time, until the piece is through."""
    for scorer in {id(one): one for one in (reference, quantized)}.values():
        if source is not None:
            scorer.condition(source)
    vocab = reference.geometry.vocab_size
    piece = piece[piece < vocab]
    # A power of two divides most pieces: an engine binds memory anew for each width it meets.
    width = 1 << max(0, (PASS_BYTES // (4 * vocab)).bit_length() - 1)
    for start in range(0, len(piece), width):
        part = piece[start : start + width]
        one, other = reference(part, start), quantized(part, start)
        for row in range(0, len(part), _ROWS):
            yield one[row : row + _ROWS], other[row : row + _ROWS]


_NAMED = 3
"""Parts named when a limit is exceeded."""


@dataclass(frozen=True)
class QualityGate:
    """Measures what quantizing did to a model, and refuses one beyond the recipe's limits."""

    options: EngineOptions
    limits: QualityOptions
    pieces: Sequence[Tokens]
    """The calibration text; pieces of it are scored one by one."""
    sources: Sequence[Source] = ()
    """Of an encoder-decoder: what each piece is a text of."""

    def encoded(self, encoder: SourceRun) -> QualityGate:
        """Return the gate of a draft that reads the hidden states of its target's encoder.

        They are those of the checkpoint, so that what is measured is the draft.
        """
        return replace(self, sources=encoder.states(self.sources))

    @property
    def max_width(self) -> int:
        """Tokens of the widest pass that scores a piece."""
        return max(map(len, self.pieces))

    def measure(
        self, role: str, original: GraphSource, scratch: Path, engine: Engine
    ) -> tuple[Quality, Likeliest]:
        """Return how far an engine is from the model it was made from, and what both say.

        Raises: BuildError for one that returns no numbers.
        """
        with self._reference(original, scratch) as reference:
            quality, likeliest = _compare(
                reference, EngineScorer(engine), self.pieces, self.sources
            )
        likeliest = likeliest.of(scored_entries(read_graph(original.graph)))
        if not isfinite(quality.kl):
            raise BuildError(
                f"the quantized {role} returns no numbers on the calibration text. This is a "
                "defect of the lowering: please report the architecture"
            )
        return quality, likeliest

    def check(
        self, role: str, original: GraphSource, quantized: Quantized, quality: Quality
    ) -> None:
        """Refuse a model beyond a limit.

        Raises: BuildError naming the parts of the model that hurt most.
        """
        exceeded = self._exceeded(quality)
        if exceeded:
            raise BuildError(
                f"the quantized {role} is further from its checkpoint than the recipe allows: "
                f"{exceeded}. {self._parts(original, quantized)}Give it more bits "
                f"({role}.precision, {role}.embedding, {role}.head, a smaller {role}.block), or "
                "change the limits in [quality]"
            )

    def likeliest(self, original: GraphSource) -> Likeliest | None:
        """Return what an unquantized model says; None where its graph cannot be run."""
        if not runs_here():
            return None
        scorer = GraphScorer(GraphRun(original.graph, original.weights), self.max_width)
        return _compare(scorer, scorer, self.pieces, self.sources)[1]

    def _exceeded(self, quality: Quality) -> str:
        most, least = self.limits.max_kl, self.limits.min_top1
        limits = []
        if most is not None and quality.kl > most:
            limits.append(f"KL divergence {quality.kl:.4f} nats, max_kl {most}")
        if least is not None and quality.top1 < least:
            limits.append(f"top-1 agreement {quality.top1:.4f}, min_top1 {least}")
        return "; ".join(limits)

    def _parts(self, original: GraphSource, quantized: Quantized) -> str:
        if not runs_here():
            return ""
        source = self.sources[0] if self.sources else None
        parts = sensitivities(
            original.graph, original.weights, quantized, self.pieces[0], source=source
        )
        worst = ", ".join(f"{one.part} ({one.kl:.4f})" for one in parts[:_NAMED])
        return f"Quantized alone, these hurt most, in nats: {worst}. "

    @contextmanager
    def _reference(self, original: GraphSource, scratch: Path) -> Iterator[Scorer]:
        """Give the unquantized model: its portable graph, or an engine where that cannot run."""
        if runs_here():
            run = GraphRun(original.graph, original.weights)
            yield GraphScorer(run, self.max_width)
            return
        whole = scratch / "unquantized"
        options = self.options
        lowered = compile_ort_cpu(
            original.graph, original.weights, whole, options.max_length, batch=options.batch,
            max_source=options.max_source,
        )  # fmt: skip
        with open_ort_cpu(lowered, options, self.max_width) as engine:
            yield EngineScorer(engine)


TOKENS = 96
"""Of the calibration text; enough to put parts in order, not to measure them."""

BUDGET_S = 120.0


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing one part alone does."""

    part: str
    kl: float


def sensitivities(
    graph: Path,
    checkpoint: Path,
    quantized: Quantized,
    piece: Tokens,
    *,
    source: Source | None = None,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> list[Sensitivity]:
    """Measure each part with all others as they were, the worst first.

    Parts that lost most of their weights' squares come first, and none is begun once the time is
    up, so that a large model answers too; the first always is.
    """
    piece, began = piece[:TOKENS], clock()
    sources = [] if source is None else [source]
    reference = GraphScorer(GraphRun(graph, checkpoint), len(piece))
    measured: list[Sensitivity] = []
    for part, stored in _parts(quantized):
        if measured and clock() - began > budget_s:
            break
        scorer = GraphScorer(_mixed(graph, checkpoint, quantized, stored), len(piece))
        found, _ = _compare(reference, scorer, [piece], sources)
        measured.append(Sensitivity(part, found.kl))
    return sorted(measured, key=lambda one: -one.kl)


def _mixed(
    graph: Path, checkpoint: Path, quantized: Quantized, stored: Mapping[str, Sequence[Stored]]
) -> GraphRun:
    """Run a model of which some weights are quantized, by the graph that reads them."""
    graphs = {part: read_graph(path) for part, path in {"": graph, **parts_beside(graph)}.items()}
    for part, weights in stored.items():
        graft(graphs[part], weights)
        take_in(graphs[part], quantized.folder)
    decoder, cross = graphs[""], graphs.get("cross")
    source = None if cross is None else SourceRun(cross, graphs.get("encoder"), checkpoint)
    return GraphRun(decoder, checkpoint, source)


def take_in(model: onnx.ModelProto, folder: Path) -> None:
    """Write the weights of a quantized graph's folder into a graph: a session reads one folder."""
    for tensor in external_tensors(model):
        if location(tensor) == WEIGHTS:
            place = {entry.key: entry.value for entry in tensor.external_data}
            length, offset = int(place["length"]), int(place["offset"])
            stored = np.fromfile(folder / WEIGHTS, np.uint8, length, offset=offset)
            tensor.raw_data = stored.tobytes()
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT


def _parts(quantized: Quantized) -> list[tuple[str, dict[str, list[Stored]]]]:
    """Return the weights of each part of the model, by the graph that reads them."""
    parts: dict[str, dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for graph, weights in {"": quantized.stored, **quantized.parts}.items():
        for stored in weights:
            parts[stored.choice.group][graph].append(stored)

    def worst(part: tuple[str, dict[str, list[Stored]]]) -> float:
        return max(stored.error for weights in part[1].values() for stored in weights)

    return sorted(parts.items(), key=worst, reverse=True)
