"""Bits of each part of a model: int8 where int4 would cost most, as far as a bound asks for it.

What comes out is about as far from the unquantized model as the sum of what each part does alone
(Malinovskii et al. 2024, arXiv:2411.17525, theorem 1), so parts are measured one at a time, and
which of them take more bits is a knapsack. Then the whole is measured, and the sum corrected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from specrt.engine.protocol import Source
from specrt.errors import BuildError
from specrt.system.memory import size
from specrt_export.checkpoint.codes import encode_codes
from specrt_export.portable.external_data import Floats, StoredTensor, atomic_file, external_tensors
from specrt_export.portable.graph import Tokens, divergences, geometry_of, runs_here, whole_graph
from specrt_export.portable.segments import SegmentedRun, Values, rows_of, weight_name
from specrt_export.precision import BitBound, Precision
from specrt_export.quantize.calibration import (
    CalibratedCodes,
    CalibrationText,
    Progress,
    content_key,
    stages,
)
from specrt_export.quantize.quantizer import find_codes
from specrt_export.quantize.weight_choice import Choice, Formats, choose
from specrt_export.quantize.weight_store import MOST_THREADS, SLICE

LOW, HIGH = "int4", "int8"

LOGITS = "logits"


@dataclass(frozen=True)
class Part:
    """Weights that one tensor is multiplied with: lowering joins them, so they have one format."""

    name: str
    """Such as `layer 3: q_proj, k_proj, v_proj`."""
    choices: tuple[Choice, ...]
    """In int4."""
    added_bytes: int
    """What int8 takes more."""


def parts_of(model: onnx.ModelProto, precision: Precision) -> list[Part]:
    """Return the parts whose bits are free, in the graph's order.

    A table that is also looked up in keeps the precision it has.
    """
    free = [
        choice.weight
        for choice in choose(model, precision)
        if all(use.products and use.role in precision.auto for use in choice.uses)
    ]
    low, high = (
        {c.weight: c for c in choose(model, precision, dict.fromkeys(free, name))}
        for name in (LOW, HIGH)
    )
    shapes = {tensor.name: tuple(tensor.dims) for tensor in external_tensors(model)}

    def added(choice: Choice) -> int:
        shape = shapes[choice.weight]
        return high[choice.weight].stored_bytes(shape) - choice.stored_bytes(shape)

    groups = stages(model, [low[weight] for weight in free if weight in low and weight in high])
    names = [_name(group) for group in groups.values()]
    return [
        # A layer that attends twice, to its text and to a source, projects twice what it found.
        Part(_name(g, 2) if names.count(name) > 1 else name, tuple(g), sum(map(added, g)))
        for name, g in zip(names, groups.values(), strict=True)
    ]


def _name(choices: Sequence[Choice], words: int = 1) -> str:
    """Return the layer of some weights, and the last words of their names."""
    groups = {choice.group for choice in choices}
    if len(groups) > 1:  # the layers of a decoder read one source
        return "cross projections"
    group = choices[0].group
    weights = [c.weight.removesuffix(".weight").rsplit(".", words)[-words:] for c in choices]
    names = ", ".join(map(".".join, weights))
    return f"{group}: {names}" if group.endswith(tuple("0123456789")) else group


TOKENS, PIECE = 256, 128
"""Tokens of a text that parts are measured on, and of a piece."""

_LOGIT_BYTES = 128 << 20
"""Logits of all pieces; a larger vocabulary has fewer tokens."""

_BRANCH_BYTES = 1 << 30
"""What is kept of the parts that are measured side by side."""


def cut_pieces(model: onnx.ModelProto, pieces: Sequence[Tokens]) -> Tokens:
    """Return pieces [P, S] to measure parts on, spread over a text."""
    most = max(1, min(TOKENS, _LOGIT_BYTES // (4 * geometry_of(model).vocab_size)))
    length = min(PIECE, most, *map(len, pieces))
    places = np.linspace(0, len(pieces) - 1, min(most // length, len(pieces))).round()
    return np.stack([pieces[int(at)][:length] for at in places])


def cut_pairs(
    model: onnx.ModelProto, pieces: Sequence[Tokens], sources: Sequence[Source]
) -> tuple[list[Tokens], list[Source]]:
    """Return texts to measure parts on and their sources, spread over those there are."""
    most = max(1, min(TOKENS, _LOGIT_BYTES // (4 * geometry_of(model).vocab_size)))
    length = min(PIECE, most)
    mean = max(1, sum(min(len(piece), length) for piece in pieces) // len(pieces))
    places = np.linspace(0, len(pieces) - 1, min(max(1, most // mean), len(pieces))).round()
    chosen = [int(at) for at in places]
    return [pieces[at][:length] for at in chosen], [sources[at] for at in chosen]


def sensitivities(
    model: onnx.ModelProto, checkpoint: Path, parts: Sequence[Part],
    codes: CalibratedCodes | None, pieces: Sequence[Tokens] | Tokens, folder: Path,
    progress: Progress, sources: Sequence[Source] = (),
) -> list[float]:  # fmt: skip
    """Measure what each part alone does in int4: the mean KL divergence, in nats.

        text ── tensor 0 ─┬─ q, k, v as they are ── tensor 1 ─┬─ o as it is ── ... ── logits
                          │                                   └─ o in int4 ─── ... ── logits
                          └─ q, k, v in int4 ────── tensor 1 ─── o as it is ── ... ── logits

    `codes` are those of a calibration; without them each weight is rounded for itself. The model is
    run in segments, with as many parts side by side as `_BRANCH_BYTES` hold. What is measured is
    kept in a folder, for a build that was killed.
    Pieces are of one length, but for texts of `sources`.
    Raises: CheckpointError, BuildError.
    """
    if not runs_here():
        raise BuildError(
            'bits "auto" runs the portable graph, which takes ONNX Runtime 1.25 or newer; upgrade '
            "it, or remove `bits`"
        )
    choices = [choice for part in parts for choice in part.choices]
    record = folder / f"sensitivities-{'search' if codes is None else 'gptq'}.json"
    key = content_key(model, checkpoint, choices, [*pieces, *sources])
    measured = _read(record, key)
    tensors = {tensor.name: StoredTensor(tensor, checkpoint) for tensor in external_tensors(model)}
    widest = max(size for choice in choices for size in tensors[choice.weight].shape)
    positions = sum(map(len, pieces)) + sum(map(_positions, sources))
    step = max(1, _BRANCH_BYTES // (8 * positions * widest))
    while len(measured) < len(parts):
        begin = len(measured)
        end = min(begin + step, len(parts))

        def show(done: float, begin: int = begin, end: int = end) -> None:
            progress("sensitivity of parts", (begin + (end - begin) * done) / len(parts))

        sweep = _Sweep(tensors, parts[begin:end], codes)
        measured += sweep.run(model, checkpoint, choices, pieces, show, sources)
        with atomic_file(record) as file:
            file.write(json.dumps({"key": key, "kl": measured}).encode())
    return measured


def _positions(source: Source) -> int:
    """Return the positions of a source: token ids, or the frames of features."""
    return int(source.shape[-1])


def _read(record: Path, key: str) -> list[float]:
    """Return what was measured before a build was killed."""
    if not record.is_file():
        return []
    written = json.loads(record.read_text())
    return list(written["kl"]) if written["key"] == key else []


class _Sweep:
    """One run of a model with branches, in each of which one part is in int4."""

    def __init__(
        self, tensors: dict[str, StoredTensor], parts: Sequence[Part], codes: CalibratedCodes | None
    ) -> None:
        self._tensors, self._codes = tensors, codes
        self._part_of = {c.weight: at for at, part in enumerate(parts) for c in part.choices}
        self._threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))

    def run(
        self, model: onnx.ModelProto, checkpoint: Path, choices: Sequence[Choice],
        pieces: Sequence[Tokens] | Tokens, progress: Callable[[float], None],
        sources: Sequence[Source] = (),
    ) -> list[float]:  # fmt: skip
        """Return the KL divergence of each part."""
        of_product = {product: choice for choice in choices for product in choice.products}
        own = onnx.ModelProto()
        own.CopyFrom(model)
        run = SegmentedRun(own, checkpoint, of_product, pieces, sources)
        tensors = [*stages(model, choices), LOGITS]
        run.plan(tensors)
        branches: dict[int, dict[str, Values]] = {}
        found: list[float] = []
        for number, tensor in enumerate(tensors):
            progress(number / len(tensors))
            used = {weight_name(p): of_product[p] for p in run.products(tensor)}
            parts = {name: self._part_of.get(choice.weight) for name, choice in used.items()}
            exact = {name: self._exact(choice) for name, choice in used.items()}
            segment, before = run.segment(tensor), run.kept
            run.kept = segment.run(before, exact)
            for part in sorted(branches.keys() | {p for p in parts.values() if p is not None}):
                own_weights = {n: self._rounded(used[n]) for n, p in parts.items() if p == part}
                branch = segment.run(branches.get(part, before), exact | own_weights)
                if tensor == LOGITS:
                    ours, theirs = (rows_of(kept[LOGITS]) for kept in (run.kept, branch))
                    found.append(_mean_divergence(ours, theirs))
                else:
                    branches[part] = branch
        return found

    def _exact(self, choice: Choice) -> Floats:
        """Return a weight as [K, N]."""
        tensor = self._tensors[choice.weight]
        whole = tensor.read(0, tensor.rows)
        return whole if choice.turned else np.ascontiguousarray(whole.T)

    def _rounded(self, choice: Choice) -> Floats:
        """Return what a weight becomes in int4, as [K, N]."""
        if self._codes is not None and choice.name in self._codes:
            return self._codes.weights(choice.name)
        weights = np.ascontiguousarray(self._exact(choice).T)

        def work(part: Floats) -> None:
            part[:] = encode_codes(
                part, LOW, choice.block, positive=choice.positive, zeros=choice.zeros
            ).floats()

        step = max(1, SLICE // weights.shape[1])
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, (weights[at : at + step] for at in range(0, len(weights), step))))
        return np.ascontiguousarray(weights.T)


def _mean_divergence(ours: Floats, theirs: Floats) -> float:
    """Return the mean KL divergence of logits [N, V], in nats."""
    step = 16
    sums = [
        divergences(ours[at : at + step], theirs[at : at + step]).sum()
        for at in range(0, len(ours), step)
    ]
    return max(0.0, float(sum(sums)) / len(ours))


def knapsack(values: Sequence[float], weights: Sequence[float], room: float) -> frozenset[int]:
    """Return the items of most value that there is room for: by value over weight, then what fits.

    Source: Dantzig 1957, "Discrete-variable extremum problems"; it misses the best by less than the
    value of one item.
    """
    order = sorted(range(len(values)), key=lambda at: -values[at] / max(weights[at], 1e-300))
    chosen = set[int]()
    for at in order:
        if weights[at] <= room:
            room -= weights[at]
            chosen.add(at)
    return frozenset(chosen)


def open_search(
    graph: Path, checkpoint: Path, precision: Precision, bound: BitBound, text: CalibrationText,
    progress: Progress,
) -> tuple[BitSearch, CalibratedCodes | None]:  # fmt: skip
    """Measure a model's parts; return the search for their bits, and the codes of a calibration.

    Codes are found once, with every part in int4: what later parts are multiplied with differs
    little where earlier ones have more bits, and trials are judged by the whole.
    Raises: CheckpointError, ExportError, BuildError.
    """
    model = whole_graph(graph)
    parts = parts_of(model, precision)
    low = {choice.weight: LOW for part in parts for choice in part.choices}
    choices = choose(model, precision, low)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in external_tensors(model)}
    least = sum(choice.stored_bytes(shapes[choice.weight]) for choice in choices)
    if bound.max_bytes is not None and bound.max_bytes < least:
        raise BuildError(
            f"max_bytes is {bound.max_bytes}, and with every part in {LOW} the weights take more "
            f"than {least} bytes; ask for more than that, or for a larger `block`"
        )
    codes = find_codes(model, checkpoint, precision, choices, text, progress)
    pieces: Sequence[Tokens] | Tokens = cut_pieces(model, text.pieces)
    sources: Sequence[Source] = ()
    if text.sources:
        pieces, sources = cut_pairs(model, text.pieces, text.sources)
    kls = sensitivities(model, checkpoint, parts, codes, pieces, text.folder, progress, sources)
    return BitSearch(parts, kls, bound, least), codes


@dataclass(frozen=True)
class BitTrial:
    """A choice of bits, and what the whole model comes to with it."""

    raised: frozenset[int]
    """Parts in int8."""
    kl: float
    bytes: int


_CLOSE = 0.9
"""Share of a bound that is near enough."""

_MARGIN = 0.97
"""Share of a bound that a corrected trial aims at."""

_MOST_TRIALS = 6


class BitSearch:
    """Finds bits that meet a bound: from sensitivities at first, then from trials of the whole."""

    def __init__(
        self, parts: Sequence[Part], kls: Sequence[float], bound: BitBound, least_bytes: int
    ) -> None:
        """Take the KL divergence of each part in int4, and about the bytes of all in int4."""
        self.parts, self._kls, self._bound = parts, kls, bound
        self._added = [part.added_bytes for part in parts]
        self._least_bytes = least_bytes
        self._trials: list[BitTrial] = []
        self._all = frozenset(range(len(parts)))

    def formats(self, raised: frozenset[int]) -> Formats:
        """Return what each weight is stored as, with some parts in int8."""
        return {
            choice.weight: HIGH if at in raised else LOW
            for at, part in enumerate(self.parts)
            for choice in part.choices
        }

    def bits(self, raised: frozenset[int]) -> dict[str, str]:
        """Return what each part is stored as, by its name."""
        return {part.name: HIGH if at in raised else LOW for at, part in enumerate(self.parts)}

    def told(self, trial: BitTrial) -> str:
        """Return a line on a trial."""
        return (
            f"{len(trial.raised)} of {len(self.parts)} parts in {HIGH}, KL divergence "
            f"{trial.kl:.4f} nats, weights {size(trial.bytes)}"
        )

    def record(self, trial: BitTrial) -> bool:
        """Take what a trial came to; tell whether it is the best so far that meets the bound."""
        self._trials.append(trial)
        return trial is self._best()

    def _best(self) -> BitTrial | None:
        met = [trial for trial in self._trials if self._meets(trial)]
        if self._bound.max_bytes is not None:
            return min(met, key=lambda trial: trial.kl, default=None)
        return min(met, key=lambda trial: trial.bytes, default=None)

    def _meets(self, trial: BitTrial) -> bool:
        most_kl, most_bytes = self._bound.max_kl, self._bound.max_bytes
        if most_bytes is not None:
            return trial.bytes <= most_bytes
        return most_kl is not None and trial.kl <= most_kl

    def propose(self) -> frozenset[int] | None:
        """Return the parts to try in int8; None where the best trial is near enough.

        Raises: BuildError for a bound that cannot be met, with the least that can.
        """
        by_bytes = self._bound.max_bytes is not None
        raised = self._within_bytes() if by_bytes else self._within_kl()
        tried = {trial.raised for trial in self._trials}
        if self._best() is not None:
            enough = len(self._trials) >= _MOST_TRIALS
            return None if raised is None or enough or raised in tried else raised
        last = frozenset[int]() if by_bytes else self._all
        if raised is None or raised in tried or len(self._trials) >= _MOST_TRIALS:
            raised = last
        if raised in tried:
            raise self._impossible(next(t for t in self._trials if t.raised == last))
        return raised

    def _impossible(self, least: BitTrial) -> BuildError:
        if self._bound.max_bytes is not None:
            return BuildError(
                f"max_bytes is {self._bound.max_bytes}, and with every part in {LOW} the weights "
                f"take {least.bytes} bytes; ask for that or more, or for a larger `block`"
            )
        return BuildError(
            f"max_kl is {self._bound.max_kl}, and with every part in {HIGH} the KL divergence is "
            f"{least.kl:.4g} nats; ask for that or more, or give embedding and head more bits"
        )

    def _within_bytes(self) -> frozenset[int]:
        """Return the parts that gain most from the bytes that are left."""
        assert self._bound.max_bytes is not None
        least = self._least_bytes
        if self._trials:  # the engine has more than weights, and each begins on a page
            least = max(t.bytes - sum(self._added[at] for at in t.raised) for t in self._trials)
        return knapsack(self._kls, self._added, self._bound.max_bytes - least)

    def _within_kl(self) -> frozenset[int] | None:
        """Return all but the parts that save most bytes for their share of the divergence."""
        assert self._bound.max_kl is not None
        room = self._room(self._bound.max_kl)
        return None if room is None else self._all - knapsack(self._added, self._kls, room)

    def _room(self, bound: float) -> float | None:
        """Return the sum of divergences at which the whole should come close to a bound.

        By a line through the two trials next to the bound, or from nothing through the only one.
        """
        if not self._trials:
            return bound
        points = sorted((self._sum(t), t.kl) for t in self._trials)
        met = [point for point in points if point[1] <= bound]
        missed = [point for point in points if point[1] > bound]
        if met and (met[-1][1] >= _CLOSE * bound or self._sum(self._best()) == sum(self._kls)):
            return None
        first, second = ([(0.0, 0.0), *points] if len(points) == 1 else points)[:2]
        if met and missed:
            first, second = met[-1], missed[0]
        elif met:
            first, second = [(0.0, 0.0), *met][-2:]
        slope = (second[1] - first[1]) / (second[0] - first[0]) if second[0] > first[0] else 0.0
        room = first[0] + (_MARGIN * bound - first[1]) / slope if slope > 0 else 0.0
        least = met[-1][0] if met else 0.0
        most = missed[0][0] if missed else sum(self._kls)
        return min(max(room, least), most)

    def _sum(self, trial: BitTrial | None) -> float:
        raised = trial.raised if trial is not None else self._all
        return sum(kl for at, kl in enumerate(self._kls) if at not in raised)
