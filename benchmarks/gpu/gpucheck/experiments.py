"""Questions about lowering that only a GPU answers: two plans of one model, launched in turns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from gpucheck import rewrites
from gpucheck.bandwidth import open_device
from gpucheck.bare import Bare, Caches, build_bare, inputs, shapes_of
from gpucheck.environment import require
from gpucheck.lowered import Rewrite, lower, mark
from gpucheck.models import source_of
from gpucheck.passes import relative
from gpucheck.place import MAX_LENGTH, Place
from gpucheck.step import CheckError, Facts, NotRunError
from gpucheck.timing import BURST, interleaved, launches, ratio, summary
from specrt.engine.tensorrt.engine_record import PLAN
from specrt.engine.tensorrt.library import lacks_to_build, open_library
from specrt_export.lower.lazy_tensor import ENGINE

WIDTHS = (1, 5)
EXTENTS = (MAX_LENGTH // 16, MAX_LENGTH // 4, MAX_LENGTH)
APART = 1e-2
"""Of the spread of the scores: what two ways of rounding in fp16 may be apart."""
EXACT = 1e-4
_FACTS = "kernels.json"


@dataclass(frozen=True)
class Variant:
    """One way to lower and build."""

    name: str
    rewrite: Rewrite | None = None
    aux_streams: int | None = None
    extents: bool = False

    def cases(self) -> dict[str, tuple[int, int | None]]:
        """Return width and extent of each profile by its name."""
        if not self.extents:
            return {f"width {width}": (width, None) for width in WIDTHS}
        return {f"width {w} of {e}": (w, e) for e in EXTENTS for w in WIDTHS}


BASE = Variant("base")
VARIANTS = {
    "filled": Variant("filled", rewrites.filled, extents=True),
    "grouped": Variant("grouped", rewrites.grouped),
    "streams": Variant("streams", aux_streams=0),
}
QUESTIONS = {
    "filled": "does attention that reads only the filled part of the buffers pay?",
    "grouped": "does attention with query groups as rows pay?",
    "streams": "is a pass on one stream as fast as with the library's own choice?",
}


def size_of(place: Place) -> str:
    """Return the model that is asked; without a GPU the small one, which is quick to build."""
    return place.experiment if place.has_gpu else "codelet"


def build(place: Place, backend: str, name: str) -> Facts:
    """Build both plans of a question, the rewritten graph first held to the other on the CPU."""
    if lacks := lacks_to_build(backend, place.found):
        raise NotRunError(lacks)
    variant, size = VARIANTS[name], size_of(place)
    facts: Facts = {"question": QUESTIONS[name], "model": size}
    if variant.rewrite is not None:
        facts["on_cpu"] = held_on_cpu(place, variant)
    for one in (BASE, variant):
        facts[one.name] = made(place, backend, one, size)
    return facts


def folder_of(place: Place, backend: str, variant: Variant, size: str) -> Path:
    """Return where a variant's plan is."""
    return place.work / f"{size}-{variant.name}-{backend}"


def made(place: Place, backend: str, variant: Variant, size: str) -> Facts:
    """Build a variant's plan unless it is there; return what its profiles launch."""
    out = folder_of(place, backend, variant, size)
    library = open_library(backend)
    stamp = {"library": library.version, "widths": list(WIDTHS), "extents": list(EXTENTS)}
    if (out / _FACTS).is_file():
        known: Facts = json.loads((out / _FACTS).read_text(encoding="utf-8"))
        if {key: known.get(key) for key in stamp} == stamp:
            return known
    lowered = place.aside / f"{out.name}.lowered"
    try:
        lower(source_of(place, size), lowered, rewrite=variant.rewrite)
        shapes = {name: shapes_of(*case) for name, case in variant.cases().items()}
        found = build_bare(
            library, mark(lowered), out / PLAN, shapes, aux_streams=variant.aux_streams
        )
    finally:
        shutil.rmtree(lowered, ignore_errors=True)
    facts: Facts = {
        **stamp,
        "plan_bytes": (out / PLAN).stat().st_size,
        "profiles": {
            one.profile: {
                "kernels": one.launches,
                "attention": one.attention,
                "activation_bytes": one.activation_bytes,
            }
            for one in found
        },
        "settings": {"aux_streams": variant.aux_streams},
    }
    (out / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
    return facts


def held_on_cpu(place: Place, variant: Variant) -> Facts:
    """Hold codelet's rewritten graph, in fp32, to the one that bundles have.

    Raises: CheckError where scores or buffers differ.
    """
    source, worst = source_of(place, "codelet"), 0.0
    place.work.mkdir(parents=True, exist_ok=True)
    folders = [place.work / f"cpu-{variant.name}-{part}" for part in ("base", "rewritten")]
    try:
        for folder, rewrite in zip(folders, (None, variant.rewrite), strict=True):
            lower(source, folder, compute="fp32", rewrite=rewrite)
        runs = [_session(folder) for folder in folders]
        vocabulary = source.geometry.vocab_size
        for width, start, extent in ((1, 90, EXTENTS[0]), (5, 100, EXTENTS[0]), (5, 0, 64)):
            fed = {**inputs(width, start, vocabulary), **_buffers(runs[0])}
            more = {rewrites.EXTENT: np.zeros(extent, np.int64)} if variant.extents else {}
            wanted, found = runs[0].run(None, fed), runs[1].run(None, {**fed, **more})
            errors = [
                relative(f, w) for f, w in zip(found, wanted, strict=True) if f.dtype.kind == "f"
            ]
            worst = max(worst, *errors)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    if not worst <= EXACT:
        raise CheckError(f"the rewritten graph is {worst:.1e} of the spread off on the CPU")
    return {"largest_relative_error": worst, "tolerance": EXACT}


def _session(folder: Path) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(folder / ENGINE), options, ["CPUExecutionProvider"])


def _buffers(session: Any) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {
        value.name: rng.standard_normal(value.shape, np.float32)
        for value in session.get_inputs()
        if value.name.startswith(("key.", "value."))
    }


def measure(place: Place, backend: str, name: str) -> Facts:
    """Launch both plans in turns.

    Raises: CheckError where their scores are further apart than rounding takes them.
    """
    require(backend, place.found)
    variant, size = VARIANTS[name], size_of(place)
    vocabulary = source_of(place, size).geometry.vocab_size
    device = open_device()
    try:
        with _plans(place, backend, variant, size, device) as (base, other):
            caches = Caches(device, base)
            return compare(base, other, device, caches, variant, vocabulary, place.laps)
    finally:
        device.close()


@contextmanager
def _plans(
    place: Place, backend: str, variant: Variant, size: str, device: Any
) -> Iterator[tuple[Any, Any]]:
    from specrt.engine.tensorrt.plan import open_plan

    paths = [folder_of(place, backend, one, size) / PLAN for one in (BASE, variant)]
    for path in paths:
        if not path.is_file():
            raise NotRunError(f"{path.parent.name} was not built: {variant.name}.build comes first")
    opened: list[Any] = []
    try:
        opened += [open_plan(path, open_library(backend), device) for path in paths]
        yield opened[0], opened[1]
    finally:
        for plan in opened:
            plan.close()


def compare(
    base: Any, other: Any, device: Any, caches: Caches, variant: Variant, vocabulary: int,
    laps: int,
) -> Facts:  # fmt: skip
    """Run every profile of a variant beside the same width of the plan as it is."""
    facts: Facts = {"burst": BURST, "laps": laps, "buffers": MAX_LENGTH}
    numbers = {width: number for number, (width, _) in enumerate(BASE.cases().values())}
    apart = 0.0
    for number, (case, (width, extent)) in enumerate(variant.cases().items()):
        start = (extent or MAX_LENGTH // 4) - width
        pair = (
            Bare(base, device, numbers[width], shapes_of(width), caches),
            Bare(other, device, number, shapes_of(width, extent), caches),
        )
        scores = []
        for one in pair:
            one.feed(**inputs(width, start, vocabulary))
            one.run()
            scores.append(one.logits(vocabulary))
        apart = max(apart, relative(scores[1], scores[0]))
        runs: dict[str, Callable[[], None]] = {
            name: launches(device, one)
            for name, one in zip(("as it is", "changed"), pair, strict=True)
        }
        times = interleaved(runs, laps)
        facts[case] = {
            "ms": summary({key: [t / BURST for t in found] for key, found in times.items()}),
            "changed_over_as_it_is": round(ratio(times["changed"], times["as it is"]), 4),
        }
        for one in pair:
            one.close()
    facts["scores_apart"] = apart
    if not apart <= APART:
        raise CheckError(f"the two plans' scores are {apart:.1e} of their spread apart", facts)
    return facts
