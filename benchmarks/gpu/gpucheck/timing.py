"""Times of passes: as the host sees them, and as the device takes them back to back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any, Protocol, TypeVar

import numpy as np

from gpucheck.passes import text
from gpucheck.step import Facts
from specrt.engine.protocol import Engine
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.tuning import turned

Clock = Callable[[], int]
Key = TypeVar("Key")
BURST = 10
"""Runs in a row that are timed together, so that waiting for the device is a small part."""


class Launchable(Protocol):
    """Captured work."""

    def launch(self) -> None:
        """Put it on the stream."""


def interleaved(
    contenders: Mapping[Key, Callable[[], None]], laps: int, clock: Clock = perf_counter_ns
) -> dict[Key, list[float]]:
    """Give every contender a turn in each lap, each lap beginning with another one.

    One turn of each comes first, uncounted.
    Units: milliseconds.
    """
    times: dict[Key, list[float]] = {key: [] for key in contenders}
    for lap in range(laps + 1):
        for key in turned(list(contenders), lap):
            began = clock()
            contenders[key]()
            if lap:
                times[key].append((clock() - began) / 1e6)
    return times


def ratio(mine: Sequence[float], other: Sequence[float]) -> float:
    """Return the median of the ratios lap by lap: drift moves both sides of each."""
    return median(m / max(o, 1e-9) for m, o in zip(mine, other, strict=True))


def fill(engine: Engine, length: int) -> None:
    """Write keys up to a length."""
    tokens, at = text(engine, max(length, 1)), 0
    while at < length:
        width = min(engine.max_width, length - at)
        engine.forward(tokens[:, at : at + width], at, 1)
        at += width


def host_passes(
    engine: Engine, widths: Sequence[int], start: int, laps: int, clock: Clock = perf_counter_ns
) -> dict[int, list[float]]:
    """Time passes as a caller sees them: until the best tokens are on the host."""
    tokens = text(engine, max(widths))

    def run(width: int) -> Callable[[], None]:
        piece = np.ascontiguousarray(tokens[:, :width])

        def one() -> None:
            for _ in range(BURST):
                engine.forward(piece, start).argmax.item(-1)

        return one

    times = interleaved({width: run(width) for width in widths}, laps, clock)
    return {width: [one / BURST for one in found] for width, found in times.items()}


def launches(device: Any, graph: Launchable, count: int = BURST) -> Callable[[], None]:
    """Return what launches a graph some times over and then waits once."""

    def run() -> None:
        for _ in range(count):
            graph.launch()
        device.wait()

    return run


def pass_graph(engine: TensorRtEngine, width: int, start: int) -> Any:
    """Return the captured pass of a width, run once so that it is there; None where none is."""
    engine.forward(text(engine, width), start)
    bound: Any = engine._passes[width, width]
    found: Any = getattr(bound, "_graphs", [None])[0]
    return found


def device_passes(
    engine: TensorRtEngine, widths: Sequence[int], start: int, laps: int,
    clock: Clock = perf_counter_ns,
) -> dict[int, list[float]]:  # fmt: skip
    """Time captured passes back to back; their feed and results are copied as always."""
    device = engine.model.device
    graphs = {width: pass_graph(engine, width, start) for width in widths}
    runs = {width: launches(device, graph) for width, graph in graphs.items() if graph is not None}
    times = interleaved(runs, laps, clock)
    return {width: [one / BURST for one in found] for width, found in times.items()}


def device_rounds(
    rounds: CapturedRounds,
    gammas: Sequence[int],
    start: int,
    laps: int,
    clock: Clock = perf_counter_ns,
) -> dict[int, list[float]]:
    """Time whole rounds back to back, each from the same place."""
    runs = {}
    for gamma in gammas:
        rounds.run([1], start, 1, start, gamma)
        rounds.run([1], start, 1, start, gamma)
        made: Any = rounds._rounds[gamma, 1]
        if made.graph is not None:
            runs[gamma] = launches(rounds._device, made.graph)
    times = interleaved(runs, laps, clock)
    return {gamma: [one / BURST for one in found] for gamma, found in times.items()}


def summary(times: Mapping[Any, Sequence[float]]) -> Facts:
    """Return medians and quartiles. Units: milliseconds."""
    return {
        str(key): {
            "median": round(median(found), 5),
            "low": round(float(np.quantile(found, 0.25)), 5),
            "high": round(float(np.quantile(found, 0.75)), 5),
        }
        for key, found in times.items()
    }
