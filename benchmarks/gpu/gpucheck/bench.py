"""Speed: passes at every width, and completions at every gamma beside plain decoding."""

from __future__ import annotations

from typing import Any

from gpucheck import bandwidth, codelet
from gpucheck.bandwidth import copy_rate
from gpucheck.built import Built
from gpucheck.codelet import texts
from gpucheck.environment import require
from gpucheck.models import opened, target_of
from gpucheck.place import Place
from gpucheck.step import CheckError, Facts
from gpucheck.timing import device_passes, device_rounds, fill, host_passes, ratio, summary
from specrt.bench.lossless import compare_outputs, plain_margin
from specrt.bench.measure import measure
from specrt.bench.report import report
from specrt.bench.measure import configurations
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.generator import Generator
from specrt.params import AUTO, SamplingParams

FILLED = 512
"""Positions that are filled when passes are timed."""
REPEATS = 2


def passes(place: Place, backend: str, size: str, precision: str) -> Facts:
    """Time a target's passes at widths 1 to gamma + 1."""
    require(backend, place.found)
    built = target_of(place, backend, size, precision)
    with codelet.device_of(backend) as device:
        engine: Any = built.open(device)
        try:
            facts = time_passes(engine, place)
        finally:
            engine.close()
        if device is not None:
            free = int(device.available()[0])
            rate = copy_rate(device, min(bandwidth.WANTED_BYTES, free // 4))
            facts |= held_to(float(rate["bytes_per_second"]), facts, built)
    return facts


def time_passes(engine: Any, place: Place) -> Facts:
    """Time passes of an engine on the host and, of a plan, on the device."""
    widths = [1, *(gamma + 1 for gamma in place.gammas)]
    start = min(FILLED, engine.max_length - max(widths))
    fill(engine, start)
    host = host_passes(engine, widths, start, place.laps)
    facts: Facts = {
        "filled": start,
        "host_ms": summary(host),
        "host_verify_over_decode": {str(w): round(ratio(host[w], host[1]), 4) for w in widths},
    }
    if isinstance(engine, TensorRtEngine):
        device = device_passes(engine, widths, start, place.laps)
        facts["device_ms"] = summary(device)
        if 1 in device:
            facts["device_verify_over_decode"] = {
                str(w): round(ratio(device[w], device[1]), 4) for w in device
            }
    return facts


def held_to(bytes_per_second: float, facts: Facts, built: Built) -> Facts:
    """Hold decode passes to the time that reading the weights takes at the measured bandwidth."""
    bound_ms = built.read_bytes / bytes_per_second * 1e3
    times: Facts = facts.get("device_ms") or facts["host_ms"]
    decode = times["1"]["median"]
    return {
        "read_bytes": built.read_bytes,
        "kv_bytes": built.geometry.kv_bytes(1, built.max_length, 2),
        "bandwidth": bytes_per_second,
        "bound_ms": round(bound_ms, 5),
        "decode_of_bound": round(bound_ms / max(decode, 1e-9), 4),
    }


def completions(place: Place, backend: str, size: str, precision: str) -> Facts:
    """Complete prompts plain, at every gamma and with auto, in turn."""
    require(backend, place.found)
    built = target_of(place, backend, size, precision)
    with opened(place, built, backend) as generator:
        facts = complete(generator, place, precision)
        rounds = generator.models.rounds
        if rounds is not None:
            start = min(FILLED, built.max_length - 2 * max(place.gammas) - 2)
            for engine in (generator.models.target, generator.models.draft):
                if engine is not None:
                    fill(engine, start)
            found = device_rounds(rounds, place.gammas, start, place.laps)  # type: ignore[arg-type]
            facts["device_round_ms"] = summary(found)
        facts["read_bytes"] = built.read_bytes
    return facts


def complete(generator: Generator, place: Place, precision: str) -> Facts:
    """Measure completions, and hold their text to plain decoding.

    Raises: CheckError where a text parts from it at a margin that is no tie.
    """
    params = SamplingParams.of(ignore_eos=True, max_tokens=place.tokens, temperature=0.0)
    ids = [generator.tokenizer.encode(text) for text in texts(place)]
    drafter = "model" if generator.models.draft else "ngram"
    compared = configurations([0, *place.gammas, AUTO], [drafter])
    samples = measure(generator, ids, compared, params, repeats=REPEATS)

    def margin(number: int, before: Any) -> float:
        return plain_margin(generator, [*ids[number], *before])

    outputs = compare_outputs(samples, margin, precision, False)
    task = report(samples, ["code"] * len(ids), outputs, 0).total
    facts: Facts = {"outputs": str(outputs), "prompts": len(ids), "tokens": place.tokens}
    for row in task.rows:
        round_us = 1e6 / row.tokens_per_second.median * row.counts.tokens_per_round
        facts[str(row.configuration.gamma)] = {
            "tokens_per_second": round(row.tokens_per_second.median, 2),
            "speedup": round(row.speedup.median, 4),
            "tokens_per_round": round(row.counts.tokens_per_round, 3),
            "round_us": round(round_us, 2),
            "outside_us": round(row.outside_us.median, 2),
            "outside_share": round(row.outside_us.median / round_us, 4),
        }
    margins = [d.margin for d in outputs.differences if d.margin is not None]
    facts["margins_where_texts_part"] = [round(m, 5) for m in margins]
    if any(m > codelet.TIE for m in margins):
        raise CheckError("speculative text parts from plain decoding at no near-tie", facts)
    return facts
