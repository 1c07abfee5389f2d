"""Make the models: codelet as a bundle, and codelet grown to the cost of a larger target."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpucheck.bandwidth import open_device
from gpucheck.built import TENSORRT, Built, of_bundle, read_built
from gpucheck.lowered import Source, build_ort_cuda, build_tensorrt
from gpucheck.place import CODELET, HERE, Place, import_tools
from gpucheck.rough import roughen
from gpucheck.step import Facts, NotRunError
from specrt.bundle import read_manifest
from specrt.engine.tensorrt.library import lacks_to_build
from specrt.generator import Generator
from specrt.speculation.pool import Models
from specrt.text import Tokenizer
from specrt.tuning import measure_costs
from specrt_export.bundle_builder import build
from specrt_export.compile.tensorrt.builder_config import RTX, PlanOptions
from specrt_export.quantize.precision import SCALED, Precision
from specrt_export.quantize.quantize import quantize
from specrt_export.recipe import read_recipe

_LEFT = 1.1
"""What has to be free besides, as a factor."""


def codelet_source(role: str) -> Source:
    """Return codelet's portable graph and weights."""
    return Source(CODELET / "portable" / f"{role}.onnx", CODELET / "checkpoint" / role, role)


def bundle_of(place: Place, pair: str, backend: str) -> Path:
    """Return where the bundle of a recipe beside this script is."""
    return place.work / f"{pair}-{backend}"


def build_bundle(place: Place, backend: str, pair: str = "codelet") -> Facts:
    """Build a recipe as `specrt build` does, each graph held to what it was made from."""
    if backend in TENSORRT and (lacks := lacks_to_build(backend, place.found)):
        raise NotRunError(lacks)
    recipe = read_recipe(HERE / f"{pair}.toml", backend=None if pair == "mixed" else backend)
    recipe = replace(recipe, engine=replace(recipe.engine, gammas=place.gammas))
    if backend == RTX:
        options = replace(recipe.tensorrt, capabilities=place.capabilities)
        recipe = replace(recipe, tensorrt=options)
    out, began = bundle_of(place, pair, backend), time.monotonic()
    place.work.mkdir(parents=True, exist_ok=True)
    build(recipe, out)
    made = read_manifest(out)
    facts: Facts = {"seconds": round(time.monotonic() - began, 1), "versions": made.versions}
    for role in ("target", "draft"):
        model = of_bundle(out, role)
        kept = made.target if role == "target" else made.draft
        assert kept is not None, "codelet has a draft"
        facts[role] = {"weight_bytes": kept.weight_bytes, "read_bytes": model.read_bytes}
        if model.backend in TENSORRT:
            facts[role]["profiles"] = {
                one.profile: {"kernels": one.launches, "attention": one.attention}
                for one in model.record.compiled
            }
    return facts


def grown(place: Place, size: str) -> Path:
    """Return the folder of a grown checkpoint and its graph."""
    return place.work / f"codelet-{size}"


def grow(place: Place, size: str) -> Facts:
    """Grow codelet's target, and export it; its outputs stay, its cost is the larger one's.

    Raises: NotRunError where the disk is too small or the packages for exporting are missing.
    """
    import_tools()
    from growth.shape import PRESETS
    from inflate import inflate
    from specrt_export.checkpoint import Checkpoint

    try:
        from specrt_export.portable.exporter import export_graph
    except ImportError as error:
        raise NotRunError(f"exporting a grown checkpoint needs {error.name}") from error
    out, began = grown(place, size), time.monotonic()
    shape = PRESETS[size]
    parameters = shape.parameters(codelet_source("target").geometry.vocab_size, tied=False)
    place.work.mkdir(parents=True, exist_ok=True)
    # The checkpoint, a plan that holds matrices in two layouts, and the lowered weights.
    copies = 1 + 1.6 + (1 if place.scratch is None else 0)
    require_disk(place, int(parameters * 2 * copies))
    shutil.rmtree(out, ignore_errors=True)
    inflate(Checkpoint.open(CODELET / "checkpoint" / "target"), out / "weights", shape, "float16")
    roughened = roughen(out / "weights")
    between = time.monotonic()
    export_graph(Checkpoint.open(out / "weights"), out / "target.onnx")
    return {
        "shape": str(shape),
        "parameters": parameters,
        "roughened_bytes": roughened,
        "grow_seconds": round(between - began, 1),
        "export_seconds": round(time.monotonic() - between, 1),
    }


def require_disk(place: Place, needed: int) -> None:
    """Raise NotRunError where the disk has no room."""
    free = shutil.disk_usage(place.work).free
    if free < needed * _LEFT:
        raise NotRunError(
            f"{needed * _LEFT / 1e9:.0f} GB of disk are needed at {place.work.name}, and "
            f"{free / 1e9:.0f} are free"
        )


def source_of(place: Place, size: str) -> Source:
    """Return the source of a size, `codelet` for the small one.

    Raises: NotRunError where it was not grown.
    """
    if size == "codelet":
        return codelet_source("target")
    folder = grown(place, size)
    if not (folder / "target.onnx").is_file():
        raise NotRunError(f"{size} was not grown: the step {size}.grow comes first")
    return Source(folder / "target.onnx", folder / "weights")


def sized(place: Place, size: str, precision: str, backend: str) -> Path:
    """Return the folder of a grown target's engine."""
    return place.work / f"{size}-{precision}-{backend}"


def build_sized(place: Place, backend: str, size: str, precision: str) -> Facts:
    """Build a grown target."""
    if backend in TENSORRT and (lacks := lacks_to_build(backend, place.found)):
        raise NotRunError(lacks)
    source, out = source_of(place, size), sized(place, size, precision, backend)
    scratch = place.aside / f"{out.name}.stored"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        if precision in SCALED:
            how = Precision.of(precision, per_row=backend in TENSORRT)
            made = quantize(source.graph, source.weights, scratch, how)
            source = Source(made.graph, made.folder)
        if backend in TENSORRT:
            options = PlanOptions(capabilities=place.capabilities if backend == RTX else ())
            return build_tensorrt(
                source,
                out,
                backend,
                gammas=place.gammas,
                precision=precision,
                options=options,
                aside=place.aside,
            )
        captured = max(place.gammas) + 1
        return build_ort_cuda(source, out, precision=precision, captured=captured)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def opened(place: Place, target: Built, backend: str) -> Iterator[Generator]:
    """Open a target with codelet's draft beside it, on one device where both are plans."""
    draft = of_bundle(bundle_of(place, "codelet", backend), "draft")
    device: Any = open_device() if backend in TENSORRT else None
    try:
        engines = [target.open(device)]
        try:
            engines.append(draft.open(device))
            yield generator_of(engines[0], engines[1], place)
        finally:
            for engine in engines:
                engine.close()
    finally:
        if device is not None:
            device.close()


def generator_of(target: Any, draft: Any, place: Place) -> Generator:
    """Return what completes prompts with a pair of engines."""
    from specrt.engine.tensorrt.fused_round import fused_rounds

    tokenizer = Tokenizer(CODELET / "checkpoint" / "target" / "tokenizer.json", None)
    models = Models(
        target, draft, (0, *place.gammas), rounds=fused_rounds(target, draft),
        measure=lambda models: measure_costs(models, tokenizer),
    )  # fmt: skip
    return Generator(models, tokenizer)


def target_of(place: Place, backend: str, size: str, precision: str = "fp16") -> Built:
    """Return the target of a size.

    Raises: NotRunError where it was not built.
    """
    if size == "codelet":
        return of_bundle(bundle_of(place, "codelet", backend), "target")
    return read_built(sized(place, size, precision, backend))
