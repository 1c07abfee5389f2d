"""How fast: memory, passes at every width, and tokens a second next to plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np

from gpucheck.correctness import TIE, random_text
from gpucheck.evidence import CheckError, Evidence, Facts, NotRunError
from gpucheck.settings import PROMPTS
from gpucheck.workbench import Built, Workbench
from specrt.bench.lossless import compare_outputs, plain_margin
from specrt.bench.measure import configurations, measure
from specrt.bench.report import report
from specrt.engine.protocol import Engine
from specrt.generator import Generator
from specrt.params import AUTO, SamplingParams
from specrt.text.prompt_file import read_prompts
from specrt.tuning.pass_timer import turned

Clock = Callable[[], int]
Key = TypeVar("Key")
TOO_FEW = 32
"""Which part of the bytes to be copied tells nothing: caches hold it."""
COPIES, LAPS = 8, 9
BURST = 10
"""Runs in a row that are timed together, so that waiting for the device is a small part."""
FILLED = 512
"""Positions that are filled when passes are timed."""
REPEATS = 2
FIRST_PROMPTS, FIRST_GAMMA = 2, 4
"""What is measured before all the rest, so that tokens a second are known soon."""


def bandwidth(bench: Workbench, backend: str, evidence: Evidence) -> None:
    """Copy from device memory to device memory."""
    device = bench.new_device()
    try:
        free, total = device.available()
        evidence.add(free_bytes=free, total_bytes=total)
        wanted = bench.settings.copied_bytes
        size = min(wanted, free // 4)
        if size < wanted // TOO_FEW:
            raise NotRunError(f"only {free >> 20} MiB of {total >> 20} are free on the GPU")
        evidence.add(copy_rate(device, size))
    finally:
        device.close()


def copy_rate(device: Any, size: int, clock: Clock = perf_counter_ns) -> Facts:
    """Return bytes moved in a second, each byte counted when it is read and when it is written.

    Several copies go onto the stream before the host waits, so that waiting is a small part.
    """
    source, target = (device.allocate(size, "a copy to time") for _ in range(2))
    rates = []
    for _ in range(1 + LAPS):
        device.wait()
        began = clock()
        for _ in range(COPIES):
            device.copy(target, source, size)
        device.wait()
        rates.append(2 * size * COPIES / max(clock() - began, 1) * 1e9)
    device.free(target)
    device.free(source)
    rates = rates[1:]  # the first warms up
    return {
        "bytes_per_second": round(median(rates)), "lowest": round(min(rates)),
        "highest": round(max(rates)), "copied_bytes": size,
    }  # fmt: skip


def bursts(
    runs: Mapping[Key, Callable[[], object]],
    laps: int,
    end: Callable[[], object] = lambda: None,
    clock: Clock = perf_counter_ns,
) -> dict[Key, list[float]]:
    """Time a burst of every run, and what `end`s it, in each lap, beginning with another one.

    One burst of each comes first, uncounted.
    Units: milliseconds a run.
    """
    times: dict[Key, list[float]] = {key: [] for key in runs}
    for lap in range(laps + 1):
        for key in turned(list(runs), lap):
            began = clock()
            for _ in range(BURST):
                runs[key]()
            end()
            if lap:
                times[key].append((clock() - began) / 1e6 / BURST)
    return times


def over_first(times: Mapping[int, Sequence[float]]) -> Facts:
    """Return each width's time over width 1's: the median of the ratios lap by lap."""
    return {
        str(width): round(median(t / max(o, 1e-9) for t, o in zip(found, times[1], strict=True)), 4)
        for width, found in times.items()
    }


def spread(times: Mapping[Any, Sequence[float]]) -> Facts:
    """Return medians and quartiles. Units: milliseconds."""
    facts: Facts = {}
    for key, found in times.items():
        low, _, high = quantiles([*found, *found], n=4)
        facts[str(key)] = {
            "median": round(median(found), 5), "low": round(low, 5), "high": round(high, 5)
        }  # fmt: skip
    return facts


def fill(engine: Engine, length: int) -> None:
    """Write keys up to a length."""
    tokens, at = random_text(engine, max(length, 1)), 0
    while at < length:
        width = min(engine.max_width, length - at)
        engine.forward(tokens[:, at : at + width], at, 1)
        at += width


def host_passes(
    engine: Engine, widths: Sequence[int], start: int, laps: int
) -> dict[int, list[float]]:
    """Time passes as a caller sees them: until the best tokens are on the host."""
    tokens = random_text(engine, max(widths))

    def run(width: int) -> Callable[[], object]:
        piece = np.ascontiguousarray(tokens[:, :width])
        return lambda: engine.forward(piece, start).argmax.item(-1)

    return bursts({width: run(width) for width in widths}, laps)


def launch_times(device: Any, graphs: Mapping[Key, Any], laps: int) -> dict[Key, list[float]]:
    """Time captured work back to back on the device; what was not captured is left out."""
    captured = {key: graph.launch for key, graph in graphs.items() if graph}
    return bursts(captured, laps, device.wait) if captured else {}


def passes(bench: Workbench, backend: str, evidence: Evidence, size: str, precision: str) -> None:
    """Time a target's passes at widths 1 to gamma + 1."""
    built = bench.target(size, precision, backend)
    with bench.device(backend) as device:
        engine = bench.open(built, device)
        try:
            time_passes(engine, bench.settings.gammas, bench.settings.laps, device, evidence)
        finally:
            engine.close()
        if device is not None:
            rate = copy_rate(
                device, min(bench.settings.copied_bytes, int(device.available()[0]) // 4)
            )
            evidence.add(bound_facts(float(rate["bytes_per_second"]), evidence.facts, built))


def time_passes(
    engine: Any, gammas: Sequence[int], laps: int, device: Any, evidence: Evidence
) -> None:
    """Time passes on the host and, where they are captured on a device of ours, there too."""
    widths = [1, *(gamma + 1 for gamma in gammas)]
    start = min(FILLED, engine.max_length - max(widths))
    fill(engine, start)
    host = host_passes(engine, widths, start, laps)
    evidence.add(filled=start, host_ms=spread(host), host_verify_over_decode=over_first(host))
    if device is None:
        return
    graphs = {width: engine.graph(width, width) for width in widths}
    times = launch_times(device, graphs, laps)
    if 1 in times:
        evidence.add(device_ms=spread(times), device_verify_over_decode=over_first(times))


def bound_facts(bytes_per_second: float, facts: Facts, built: Built) -> Facts:
    """Compare decode passes with the time that reading the weights takes at this bandwidth."""
    bound_ms = built.read_bytes / bytes_per_second * 1e3
    decode = (facts.get("device_ms") or facts["host_ms"])["1"]["median"]
    return {
        "read_bytes": built.read_bytes,
        "kv_bytes": built.geometry.kv_bytes(1, built.max_length, 2),
        "bandwidth": bytes_per_second,
        "bound_ms": round(bound_ms, 5),
        "decode_of_bound": round(bound_ms / max(decode, 1e-9), 4),
    }


def speed(bench: Workbench, backend: str, evidence: Evidence, size: str, precision: str) -> None:
    """Complete prompts plain, at every gamma and with auto, in turn."""
    settings, built = bench.settings, bench.target(size, precision, backend)
    texts = [prompt.text for prompt in read_prompts(PROMPTS)[: settings.prompts]]
    with bench.pair(built, bench.codelet(backend, "draft")) as generator:
        evidence.add(read_bytes=built.read_bytes, prompts=len(texts), tokens=settings.tokens)
        first = min(settings.gammas, key=lambda gamma: abs(gamma - FIRST_GAMMA))
        complete(generator, texts[:FIRST_PROMPTS], [0, first], settings.tokens, precision, evidence)
        everything = [0, *settings.gammas, AUTO]
        complete(generator, texts, everything, settings.tokens, precision, evidence)
        rounds: Any = generator.models.rounds
        if rounds is not None:
            start = min(FILLED, built.max_length - 2 * max(settings.gammas) - 2)
            for engine in (generator.models.target, generator.models.draft):
                assert engine is not None, "rounds are of two models"
                fill(engine, start)
            graphs = {}
            for gamma in settings.gammas:
                for _ in range(2):  # the first may be what is captured
                    rounds.run([1], start, 1, start, gamma)
                graphs[gamma] = rounds.graph(gamma, 1)
            device = generator.models.target.model.device  # type: ignore[attr-defined]
            times = launch_times(device, graphs, settings.laps)
            evidence.add(device_round_ms=spread(times))


def complete(
    generator: Generator, texts: Sequence[str], gammas: Sequence[Any], tokens: int,
    precision: str, evidence: Evidence,
) -> None:  # fmt: skip
    """Measure completions, and compare their text with plain decoding.

    Raises: CheckError where a text parts from it at a margin that is not a tie.
    """
    params = SamplingParams.of(ignore_eos=True, max_tokens=tokens, temperature=0.0)
    ids = [generator.tokenizer.encode(text) for text in texts]
    drafter = "model" if generator.models.draft else "ngram"
    samples = measure(generator, ids, configurations(gammas, [drafter]), params, repeats=REPEATS)

    def margin(number: int, before: Any) -> float:
        return plain_margin(generator, [*ids[number], *before])

    outputs = compare_outputs(samples, margin, precision, False)
    rows = report(samples, ["code"] * len(ids), outputs, 0).total.rows
    for row in rows:
        round_us = 1e6 / row.tokens_per_second.median * row.counts.tokens_per_round
        evidence.part(str(row.configuration.gamma)).add(
            tokens_per_second=round(row.tokens_per_second.median, 2),
            speedup=round(row.speedup.median, 4),
            tokens_per_round=round(row.counts.tokens_per_round, 3),
            round_us=round(round_us, 2),
            outside_share=round(row.outside_us.median / round_us, 4),
            measured_prompts=len(texts),
        )
    margins = [d.margin for d in outputs.differences if d.margin is not None]
    evidence.add(outputs=str(outputs), margins_where_texts_part=[round(m, 5) for m in margins])
    if any(m > TIE for m in margins):
        raise CheckError("speculative text parts from plain decoding at no near-tie")
