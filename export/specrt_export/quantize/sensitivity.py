"""Which parts of a model its quantization hurts most, one part at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from specrt_export.mapped import external_tensors, location
from specrt_export.portable import GraphRun, Tokens, read_graph
from specrt_export.quality import GraphScorer, measure
from specrt_export.quantize.graft import graft
from specrt_export.quantize.quantize import WEIGHTS, Quantized
from specrt_export.quantize.store import Stored

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
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> list[Sensitivity]:
    """Measure each part with all others as they were, the worst first.

    Parts that lost most of their weights' squares come first, and none is begun once the time is
    up, so that a large model answers too; the first always is.
    """
    piece, began = piece[:TOKENS], clock()
    reference = GraphScorer(GraphRun(graph, checkpoint), len(piece))
    found: list[Sensitivity] = []
    for part, stored in _parts(quantized):
        if found and clock() - began > budget_s:
            break
        mixed = read_graph(graph)
        graft(mixed, stored)
        take_in(mixed, quantized.folder)
        scorer = GraphScorer(GraphRun(mixed, checkpoint), len(piece))
        found.append(Sensitivity(part, measure(reference, scorer, [piece]).kl))
    return sorted(found, key=lambda one: -one.kl)


def take_in(model: onnx.ModelProto, folder: Path) -> None:
    """Write the weights of a quantized graph's folder into a graph: a session reads one folder."""
    for tensor in external_tensors(model):
        if location(tensor) == WEIGHTS:
            place = {entry.key: entry.value for entry in tensor.external_data}
            length, offset = int(place["length"]), int(place["offset"])
            held = np.fromfile(folder / WEIGHTS, np.uint8, length, offset=offset)
            tensor.raw_data = held.tobytes()
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT


def _parts(quantized: Quantized) -> list[tuple[str, list[Stored]]]:
    parts: dict[str, list[Stored]] = defaultdict(list)
    for stored in quantized.stored:
        parts[stored.choice.group].append(stored)
    return sorted(parts.items(), key=lambda part: -max(stored.error for stored in part[1]))
