"""Every step there is, the most telling first: ten minutes have to be enough for those."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpucheck import bench, codelet, experiments, models, probe
from gpucheck.bandwidth import bandwidth
from gpucheck.built import TENSORRT
from gpucheck.environment import BACKENDS, backends, environment
from gpucheck.place import HERE, ROOT, Place
from gpucheck.step import CheckError, Facts, NotRunError, Step

_RTX = "tensorrt-rtx"


def steps(place: Place) -> list[Step]:
    """Return all steps in their order."""
    return list(_steps(place))


def _steps(place: Place) -> Iterator[Step]:
    yield Step("environment", "", environment, needs_gpu=False, minutes=0.2)
    yield Step("backends", "", backends, needs_gpu=False, minutes=0.2)
    yield Step("bandwidth", "", bandwidth, minutes=0.2)
    yield Step("probe", _RTX, probe.probe, minutes=1, **_without(_RTX))
    for backend in BACKENDS:
        yield from _codelet(backend)
    if place.rehearse:
        yield Step("rehearsal", "", rehearsal, needs_gpu=False)
    for size in place.sizes:
        yield Step(f"{size}.grow", "", _grow(size), minutes=0.5 if size == "1B" else 4)
        for backend in BACKENDS:
            yield from _sized(size, "fp16", backend)
    for backend in TENSORRT:
        for name in experiments.QUESTIONS:
            build = partial(_experiment, experiments.build, name)
            measure = partial(_experiment, experiments.measure, name)
            yield Step(f"{name}.build", backend, build, minutes=1, **_without(backend))
            yield Step(f"{name}.measure", backend, measure, minutes=0.5)
    for precision in place.precisions:
        for size in place.sizes if precision != "fp16" else ():
            for backend in BACKENDS:
                yield from _sized(size, precision, backend)
    yield from _others()


def _without(backend: str) -> dict[str, Any]:
    """Say what building for a backend needs: TensorRT times kernels on a GPU, the others do not."""
    if backend == _RTX:
        return {"needs_gpu": False, "package": "tensorrt-rtx"}
    return {"needs_gpu": backend in TENSORRT}


def _codelet(backend: str) -> Iterator[Step]:
    yield Step("codelet.build", backend, models.build_bundle, minutes=0.7, **_without(backend))
    yield Step("codelet.logits", backend, codelet.logits, minutes=0.3)
    yield Step("codelet.engine", backend, codelet.engine, minutes=0.7)
    if backend in TENSORRT:
        yield Step("codelet.rounds", backend, codelet.rounds, minutes=0.3)
    yield Step("codelet.verify", backend, codelet.verify, minutes=0.7)
    yield Step("codelet.passes", backend, _measured(bench.passes, "codelet", "fp16"), minutes=0.3)
    yield Step("codelet.bench", backend, _measured(bench.completions, "codelet", "fp16"), minutes=1)
    if backend in TENSORRT:
        yield Step("codelet.forms", backend, codelet.forms, minutes=0.7)


def _sized(size: str, precision: str, backend: str) -> Iterator[Step]:
    if precision == "fp8" and backend == "ort-cuda":
        return
    name, long = f"{size}-{precision}", 4.0 if size == "8B" else 1.0

    def build(place: Place, backend: str) -> Facts:
        return models.build_sized(place, backend, size, precision)

    yield Step(f"{name}.build", backend, _capable(precision, build), minutes=long)
    for part, run, minutes in (("logits", sized_logits, 0.5), ("passes", bench.passes, 0.5),
                               ("bench", bench.completions, 1.5)):  # fmt: skip
        measured = _capable(precision, _measured(run, size, precision))
        yield Step(f"{name}.{part}", backend, measured, minutes=minutes)


Run = Callable[[Place, str], Facts]


def _measured(run: Callable[[Place, str, str, str], Facts], size: str, precision: str) -> Run:
    return lambda place, backend: run(place, backend, size, precision)


def _capable(precision: str, run: Run) -> Run:
    """Leave fp8 out where the GPU has none."""

    def checked(place: Place, backend: str) -> Facts:
        capability = place.found.gpus[0].capability if place.found.gpus else ""
        if precision == "fp8" and capability and float(capability) < 8.9:
            raise NotRunError(f"fp8 needs capability 8.9, and this GPU has {capability}")
        return run(place, backend)

    return checked


def _grow(size: str) -> Run:
    return lambda place, backend: models.grow(place, size)


def _experiment(
    run: Callable[[Place, str, str], Facts], name: str, place: Place, backend: str
) -> Facts:
    return run(place, backend, name)


def sized_logits(place: Place, backend: str, size: str, precision: str) -> Facts:
    """Hold a grown target to codelet itself, whose outputs it has."""
    from gpucheck import checks
    from gpucheck.environment import require

    require(backend, place.found)
    built = models.target_of(place, backend, size, precision)
    with codelet.device_of(backend) as device:
        engine = built.open(device)
        try:
            return checks.logits(engine, codelet.reference("target"), GROWN[precision])
        finally:
            engine.close()


GROWN = {"fp16": 2e-2, "int8": 8e-2, "fp8": 2e-1}
"""Of the spread. Grown fp16 weights round twice; quantized ones are held to those they were made
of, so this is what quantizing does, not what the backend does."""


def rehearsal(place: Place, backend: str) -> Facts:
    """Run the checks of engines over plans in NumPy, which come with the tests."""
    from gpucheck.rehearsal import rehearse

    return rehearse()


def _others() -> Iterator[Step]:
    yield Step("mixed.build", "ort-cuda", partial(models.build_bundle, pair="mixed"),
               needs_gpu=False, minutes=0.7)  # fmt: skip
    yield Step("mixed.verify", "ort-cuda", partial(codelet.verify, pair="mixed"), minutes=0.7)
    yield Step("provider", "ort-cuda", provider, needs_gpu=False, package="onnxruntime-gpu",
               minutes=0.5)  # fmt: skip
    yield Step("tests", "", tests, minutes=2)


def provider(place: Place, backend: str) -> Facts:
    """Run bundles with the real CUDA provider over a device that does nothing."""
    if place.has_gpu:
        raise NotRunError("there is a GPU, where the provider has more to do")
    script, bundle = HERE / "gpucheck" / "provider.py", models.bundle_of(place, "codelet", backend)
    command = [sys.executable, str(script), str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    said = (done.stdout + done.stderr).strip().splitlines() or [""]
    if "has no CUDA provider" in said[-1]:
        raise NotRunError(said[-1])
    facts: Facts = {"models": [json.loads(line) for line in done.stdout.splitlines()]}
    if done.returncode:
        raise CheckError(f"the provider did not do what it should: {said[-1]}", facts)
    return facts


def tests(place: Place, backend: str) -> Facts:
    """Run the tests that are marked `gpu`."""
    tests_of = str(ROOT / "tests" / "gpu" / "test_on_gpu.py")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", tests_of]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = (done.stdout + done.stderr).strip().splitlines()[-20:]
    if any("No module named pytest" in line for line in lines):
        raise NotRunError("pytest is not installed")
    if done.returncode:
        raise CheckError(f"tests failed: {lines[-1] if lines else ''}", {"said": lines})
    return {"said": lines}
