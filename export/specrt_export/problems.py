"""What is wrong with a recipe: values that no engine can be built for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specrt.engine import TENSORRT as TENSORRT
from specrt.engines.tensorrt.library import OLDEST, parse_version
from specrt.models import AUTO
from specrt_export.quantize.precision import BLOCKS, PER_ROW, PRECISIONS

if TYPE_CHECKING:
    from specrt_export.recipe import Recipe

BACKENDS = {
    "ort-cpu": tuple(p for p in PRECISIONS if p != "fp8"),
    "ort-cuda": tuple(p for p in PRECISIONS if p not in ("fp32", "fp8")),
    "tensorrt": PRECISIONS,
    "tensorrt-rtx": PRECISIONS,
}
"""Each backend, and the precisions it has engines for."""

BATCHES = range(1, 65)
MOST_CANDIDATES = 3840
"""TensorRT's limit for the best of a row."""

"""The TensorRT that the simplest form of a graph is written for."""

_BLOCKED = ("int8", "int4")

Problems = Iterator[tuple[bool, str]]


def problems(recipe: Recipe) -> Problems:
    """Yield, for each thing that can be wrong, whether it is, and what to say of it."""
    yield from _engine(recipe)
    yield from _tensorrt(recipe)
    yield from _weights(recipe)
    yield from _quality(recipe)


def _engine(recipe: Recipe) -> Problems:
    name, e = recipe.name, recipe.engine
    widest = max(e.gammas, default=0) + 1
    folder = name.isprintable() and "/" not in name and name[:1] not in ("", ".")
    yield not folder or len(name) > 255, f"name is {name!r}; expected a plain folder name"
    named = {"engine": e.backend, **{r: s.backend for r, s in recipe.sources.items() if s.backend}}
    for where, backend in named.items():
        yield (
            backend not in BACKENDS,
            f"{where}.backend is {backend!r}; this version builds {', '.join(BACKENDS)}",
        )
    yield (
        e.batch not in BATCHES,
        f"engine.batch is {e.batch}; expected {BATCHES[0]} to {BATCHES[-1]}",
    )
    yield (
        e.batch != 1 and "ort-cuda" in map(recipe.backend_of, recipe.sources),
        f"engine.batch is {e.batch}, and ort-cuda builds batch 1: its attention takes several "
        "tokens at once for one row only. Build with batch 1, or for ort-cpu",
    )
    yield e.max_length < 2, f"engine.max_length is {e.max_length}; expected 2 or more"
    yield (
        any(g < 0 for g in e.gammas),
        f"engine.gammas is {list(e.gammas)}; expected 0 or more each",
    )
    yield (
        e.gamma not in (AUTO, 0, *e.gammas),
        f"engine.gamma is {e.gamma}; expected {AUTO!r}, 0 or one of engine.gammas {list(e.gammas)}",
    )
    yield (
        not 1 <= e.prefill <= e.max_length,
        f"engine.prefill is {e.prefill}; expected 1 to max_length ({e.max_length})",
    )
    yield (
        widest > e.max_length,
        f"engine.gammas reaches {widest - 1}; a pass of {widest} does not fit {e.max_length}",
    )


def _tensorrt(recipe: Recipe) -> Problems:
    said, engine = recipe.tensorrt, recipe.engine
    widest = max(engine.gammas, default=0) + 1
    uses = any(backend in TENSORRT for backend in map(recipe.backend_of, recipe.sources))
    yield (
        not 0 <= said.candidates <= MOST_CANDIDATES,
        f"tensorrt.candidates is {said.candidates}; expected 0 to {MOST_CANDIDATES}",
    )
    yield (
        bool(said.version)
        and re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}(\.[0-9.]*)?", said.version) is None,
        f"tensorrt.version is {said.version!r}; expected one such as '10.3'",
    )
    yield (
        bool(said.version) and parse_version(said.version)[:2] < OLDEST,
        f"tensorrt.version is {said.version!r}; graphs are written for TensorRT "
        f"{'.'.join(map(str, OLDEST))} and later",
    )
    yield (
        uses and engine.prefill < max(2, widest),
        f"engine.prefill is {engine.prefill}; with TensorRT passes near the length limit go "
        f"through it, so expected {max(2, widest)} or more",
    )


def _weights(recipe: Recipe) -> Problems:
    for role, source in recipe.sources.items():
        backend = recipe.backend_of(role)
        known = BACKENDS.get(backend, ())
        own = f"{role}.precision" if source.precision else "engine.precision"
        asked = {own: source.precision or recipe.engine.precision}
        asked |= {f"{role}.{key}": getattr(source, key) for key in ("embedding", "head")}
        for key, value in asked.items():
            yield (
                value not in known and (value != "" or key == own),
                f"{key} is {value!r}; {backend} builds {', '.join(known)}",
            )
    common = recipe.engine.precision
    yield (
        common not in PRECISIONS,
        f"engine.precision is {common!r}; expected one of {', '.join(PRECISIONS)}",
    )
    for role, precision in recipe.precisions.items():
        block = recipe.sources[role].block
        yield (
            block not in (0, *BLOCKS),
            f"{role}.block is {block}; expected one of {', '.join(map(str, BLOCKS))}",
        )
        yield (
            block > 0 and not precision.quantizes,
            f"{role}.block is {block}, and nothing of the {role} is {' or '.join(_BLOCKED)}; "
            "remove it, or set a precision",
        )
        yield (
            block > 0 and precision.per_row and not precision.block,
            f"{role}.block is {block}, and {recipe.backend_of(role)} keeps one scale for each row "
            f"of {' and '.join(PER_ROW)}; remove it",
        )


def _quality(recipe: Recipe) -> Problems:
    q = recipe.quality
    quantized = [role for role, precision in recipe.precisions.items() if precision.quantizes]
    yield (
        bool(quantized) and not q.calibration,
        f"quality.calibration is missing, and the {' and '.join(quantized)} would be quantized; "
        "name a text beside the recipe to measure on, of the kind the models will meet, as "
        '`[quality]` with `calibration = "calibration.jsonl"`',
    )
    limits = [key for key in ("max_kl", "min_top1") if getattr(q, key) is not None]
    stored = [role for role, precision in recipe.precisions.items() if precision.rewrites]
    yield (
        bool(limits and stored) and not q.calibration,
        f"quality.{' and '.join(limits)} cannot be held to without quality.calibration, and the "
        f"{' and '.join(stored)} would not be stored as fp32; name a text to measure on as "
        "`calibration`, or remove the limits",
    )
    yield (
        q.max_kl is not None and not q.max_kl >= 0,
        f"quality.max_kl is {q.max_kl}; expected 0 or more nats",
    )
    yield (
        q.min_top1 is not None and not 0 <= q.min_top1 <= 1,
        f"quality.min_top1 is {q.min_top1}; expected a share from 0 to 1",
    )
