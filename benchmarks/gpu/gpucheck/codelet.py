"""The checks on codelet: each opens what it needs and closes it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpucheck import checks, inside
from gpucheck.bandwidth import open_device
from gpucheck.built import TENSORRT, Built, of_bundle, read_built
from gpucheck.environment import require
from gpucheck.lowered import build_tensorrt
from gpucheck.models import bundle_of, codelet_source
from gpucheck.place import CODELET, PROMPTS, Place
from gpucheck.step import CheckError, Facts
from specrt.bench.lossless import compare, first_difference, plain_margin
from specrt.engine.protocol import Engine
from specrt.engine.tensorrt.library import DECOMPOSED
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.text import read_prompts
from specrt_export.bundle_builder import build
from specrt_export.portable.graph import GraphRun
from specrt_export.recipe import read_recipe

TIE = 0.1
"""Logits; what fp16 may move them by on codelet, whose scores spread over 28."""
_SLACK_BYTES = 32 << 20


@contextmanager
def device_of(backend: str) -> Iterator[Any]:
    """Give a device for plans; ONNX Runtime brings its own."""
    device = open_device() if backend in TENSORRT else None
    try:
        yield device
    finally:
        if device is not None:
            device.close()


def model_of(place: Place, backend: str, role: str) -> Built:
    """Return a model of codelet's bundle, where the backend can run.

    Raises: NotRunError.
    """
    require(backend, place.found)
    return of_bundle(bundle_of(place, "codelet", backend), role)


def reference(role: str) -> GraphRun:
    """Return the portable graph in fp32 on the CPU."""
    source = codelet_source(role)
    return GraphRun(source.graph, source.weights)


def logits(place: Place, backend: str) -> Facts:
    """Hold the logits of both models to fp32 on the CPU."""
    facts: Facts = {}
    for role in ("draft", "target"):
        built = model_of(place, backend, role)
        with device_of(backend) as device:
            engine = built.open(device)
            try:
                tolerance = checks.TOLERANCES[built.precision]
                facts[role] = checks.logits(engine, reference(role), tolerance)
            finally:
                engine.close()
    return facts


def engine(place: Place, backend: str) -> Facts:
    """Run every check of the target; all are run, and the first that failed is told."""
    built = model_of(place, backend, "target")
    with device_of(backend) as device:

        def opened(capture: bool) -> Engine:
            return built.open(device, capture=capture)

        def near_the_limit() -> Facts:
            one = opened(True)
            try:
                return checks.limit(one, reference("target"), checks.TOLERANCES[built.precision])
            finally:
                one.close()

        def in_place() -> Facts:
            one: Any = opened(True)
            try:
                return inside.aliasing(one)
            finally:
                one.close()

        wanted: dict[str, Callable[[], Facts]] = {
            "rollback": lambda: checks.rollback(opened),
            "replays": lambda: checks.replays(opened),
            "limit": near_the_limit,
        }
        if device is not None:
            wanted["aliasing"] = in_place
            wanted["memory"] = lambda: checks.memory(
                opened, lambda: int(device.available()[0]), _SLACK_BYTES
            )
        return every(wanted)


def every(wanted: dict[str, Callable[[], Facts]]) -> Facts:
    """Run checks one after the other whatever each says.

    Raises: CheckError with all that was found, where any failed.
    """
    facts: Facts = {}
    failed = []
    for name, check in wanted.items():
        began = time.monotonic()
        try:
            facts[name] = {"passed": True, **check()}
        except CheckError as error:
            facts[name] = {"passed": False, "reason": str(error), **error.facts}
            failed.append(f"{name}: {error}")
        except EngineError as error:
            facts[name] = {"passed": False, "reason": str(error)}
            failed.append(f"{name}: {error}")
        facts[name]["seconds"] = round(time.monotonic() - began, 2)
    if failed:
        raise CheckError("; ".join(failed), facts)
    return facts


def rounds(place: Place, backend: str) -> Facts:
    """Hold whole rounds to single passes."""
    built = [model_of(place, backend, role) for role in ("target", "draft")]
    with device_of(backend) as device:
        engines: list[Any] = []
        try:
            engines += [one.open(device) for one in built]
            return inside.rounds(engines[0], engines[1], place.gammas)
        finally:
            for one in engines:
                one.close()


def forms(place: Place, backend: str) -> Facts:
    """Build the draft in the decomposed form, and hold it to the native one."""
    native = model_of(place, backend, "draft")
    out = place.work / f"decomposed-{backend}"
    made = build_tensorrt(codelet_source("draft"), out, backend, gammas=(), form=DECOMPOSED)
    with device_of(backend) as device:
        engines: list[Any] = []
        try:
            engines += [one.open(device) for one in (native, read_built(out))]
            return {
                "build": made,
                **inside.forms(engines[0], engines[1], checks.TOLERANCES["fp16"]),
            }
        finally:
            for one in engines:
                one.close()


def texts(place: Place) -> list[str]:
    """Return the prompts that are completed."""
    return [prompt.text for prompt in read_prompts(PROMPTS)[: place.prompts]]


def verify(place: Place, backend: str, pair: str = "codelet") -> Facts:
    """Hold greedy output at every gamma to plain decoding, and plain decoding to the CPU's."""
    require(backend, place.found)
    bundle = bundle_of(place, pair, backend)
    of_bundle(bundle, "target")
    prompts = texts(place)
    with load(bundle) as opened:
        gammas: list[Gamma] = [*place.gammas, AUTO]
        report = list(compare(opened, prompts, gammas, place.tokens, TIE))[-1]
        facts: Facts = {
            "notices": list(opened.notices),
            "whole_rounds": opened.models.rounds is not None,
            **report.to_json(),
        }
        facts["cpu"] = beside_cpu(opened, place, prompts)
    if report.unexplained:
        raise CheckError(f"{report.unexplained} divergences that rounding does not explain", facts)
    if not report.drafted:
        raise CheckError("nothing was drafted, so nothing was verified", facts)
    if facts["cpu"]["unexplained"]:
        raise CheckError("output differs from fp32 on the CPU at margins that are no ties", facts)
    return facts


def beside_cpu(opened: Generator, place: Place, prompts: list[str]) -> Facts:
    """Complete prompts on the CPU in fp32 too; where texts part, tell the CPU's own margin."""
    params = SamplingParams(max_tokens=place.tokens, ignore_eos=True)
    found = [opened.generate(p, params, gamma=0).token_ids for p in prompts]
    bundle = place.work / "codelet-ort-cpu"
    if not (bundle / "manifest.json").is_file():
        place.work.mkdir(parents=True, exist_ok=True)
        build(read_recipe(CODELET / "recipe.toml", backend="ort-cpu"), bundle)
    margins = []
    with load(bundle) as cpu:
        for prompt, mine in zip(prompts, found, strict=True):
            wanted = cpu.generate(prompt, params, gamma=0).token_ids
            at = first_difference(wanted, mine)
            if at is not None:
                ids = [*cpu.tokenizer.encode(prompt), *wanted[:at]]
                margins.append(round(plain_margin(cpu, ids), 5))
    return {
        "prompts": len(prompts),
        "identical": len(prompts) - len(margins),
        "margins_where_texts_part": margins,
        "tolerance": TIE,
        "unexplained": sum(margin > TIE for margin in margins),
    }
