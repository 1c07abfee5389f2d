"""A recipe: the TOML that a bundle is built from, read and held to what can be built."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from specrt.bundle import CHAIN_HEAD
from specrt.doctor import best_backend
from specrt.engine.backends import BACKENDS
from specrt.engine.tensorrt.library import LAST_MAJOR, NATIVE_FROM, OLDEST, parse_version
from specrt.errors import CheckpointError, RecipeError, first_line
from specrt.held_file import read_file
from specrt.params import AUTO
from specrt.records import read
from specrt.speculation.drafters import available_drafters
from specrt_export.checkpoint.checkpoint import Checkpoint, QuantizedSource
from specrt_export.checkpoint.gguf.reader import SUFFIX, GgufFile
from specrt_export.checkpoint.hub_cache import is_hub_name
from specrt_export.heads.mtp_format import KIND as MTP
from specrt_export.heads.mtp_format import carries_head
from specrt_export.precision import AUTO_BITS, BLOCKS, PER_ROW, PRECISIONS, STORAGE, STORED
from specrt_export.recipe.compiler_spec import COMPILERS
from specrt_export.recipe.model_options import ModelOptions
from specrt_export.recipe.recipe_tables import (
    NONE,
    EngineOptions,
    ModelSource,
    QualityOptions,
    RecipeTables,
    TensorRtOptions,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Recipe:
    """One bundle: a target, a draft, and what to build for them.

    Speculation is lossless with respect to the target that is built: output is identical to the
    plain decoding of the *quantized* target. `quality` is about the step before that.
    """

    path: Path
    name: str
    target: ModelSource
    draft: ModelSource | None
    seeks_head: bool
    """Whether a head in the target's own checkpoint drafts: nothing else is named."""
    engine: EngineOptions
    quality: QualityOptions
    tensorrt: TensorRtOptions

    @property
    def folder(self) -> Path:
        """Return the folder that relative names are relative to."""
        return self.path.parent

    @property
    def sources(self) -> dict[str, ModelSource]:
        """Return the models there are, the target first."""
        both = {"target": self.target, "draft": self.draft}
        return {role: source for role, source in both.items() if source is not None}

    @property
    def models(self) -> dict[str, ModelOptions]:
        """Return what it says of each model, the target first."""
        return {
            role: ModelOptions(self.path, role, source, self.engine, self.tensorrt)
            for role, source in self.sources.items()
        }


def read_recipe(path: Path, *, backend: str | None = None) -> Recipe:
    """Read and check a recipe; `backend` replaces those it names, the models' own too.

    Raises: RecipeError naming the key, the value and what was expected.
    """
    return recipe_of(parse(path), path, backend=backend)


def recipe_of(data: dict[str, Any], path: Path, *, backend: str | None = None) -> Recipe:
    """Return the recipe of what a file holds, as `read_recipe` does; `path` is named in errors."""
    if "target" not in data:
        raise RecipeError(f"{path}: [target] is missing; it needs at least `checkpoint`")
    try:
        tables = read(RecipeTables, data)
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from error
    default = path.resolve().parent.name if path.stem == "recipe" else path.stem
    recipe = Recipe(
        path=path,
        name=default if tables.name is None else tables.name,
        target=tables.target,
        draft=_draft_of(tables, path),
        seeks_head=tables.draft is None,
        engine=tables.engine,
        quality=tables.quality,
        tensorrt=tables.tensorrt,
    )
    if backend:
        recipe = _for_backend(recipe, backend)
    if recipe.engine.backend == AUTO:
        engine = replace(recipe.engine, backend=_best_here(recipe))
        recipe = replace(recipe, engine=engine)
    for wrong, message in problems(recipe):
        if wrong:
            raise RecipeError(f"{path}: {message}")
    return recipe


def _draft_of(tables: RecipeTables, path: Path) -> ModelSource | None:
    """Return what [draft] names: of the head in a checkpoint, the target's where it names none.

    Raises: RecipeError where it names a checkpoint and no draft.
    """
    draft, own = tables.draft, tables.target
    if draft is None or (draft.kind == NONE and not draft.checkpoint):
        return None
    if draft.kind == NONE:
        raise RecipeError(
            f"{path}: draft.kind is {NONE!r}, and draft.checkpoint {draft.checkpoint!r}; remove "
            "one of both"
        )
    if draft.kind != MTP or draft.checkpoint:
        return draft
    return replace(draft, checkpoint=own.checkpoint, revision=draft.revision or own.revision)


def _for_backend(recipe: Recipe, backend: str) -> Recipe:
    """Return a recipe all of whose models are for one backend."""
    return replace(
        recipe,
        target=replace(recipe.target, backend=""),
        draft=recipe.draft and replace(recipe.draft, backend=""),
        engine=replace(recipe.engine, backend=backend),
    )


def _best_here(recipe: Recipe) -> str:
    """Return the fastest backend of this machine that compiles what the recipe names."""
    best = best_backend()
    names = {
        n
        for r, s in recipe.sources.items()
        if not s.backend
        for n in recipe.models[r].precision.names
    }
    spec = COMPILERS[best]
    fits = names <= set(spec.precisions) and recipe.engine.batch <= spec.most_rows
    return best if fits else next(iter(COMPILERS))


def with_own_head(recipe: Recipe, target: Checkpoint) -> Recipe:
    """Return a recipe that names no draft with the head that its target's checkpoint carries.

    Without one that the target's backend runs it is the same recipe.
    """
    own = recipe.models["target"]
    source, runs = own.source, CHAIN_HEAD in BACKENDS[own.backend].runs
    free = recipe.draft is None and recipe.seeks_head and not source.graph
    if not (free and runs and target.source is None and carries_head(target)):
        return recipe
    draft = ModelSource(
        source.checkpoint, source.revision, kind=MTP, embedding=source.embedding, head=source.head,
        precision=source.precision or ("int8" if source.bits else ""), backend=source.backend,
    )  # fmt: skip
    return replace(recipe, draft=draft, seeks_head=False)


def settle(recipe: Recipe, sources: Mapping[str, QuantizedSource]) -> Recipe:
    """Return a recipe whose quantized checkpoints are kept as they are stored.

    `sources` are what the models are stored in that may hold codes.
    Raises: CheckpointError for a format that no engine holds; RecipeError where the recipe asks
    for something else of such a checkpoint, or for this of another.
    """
    settled = recipe
    for role in recipe.sources:
        settled = _settle(settled, role, sources.get(role))
    for wrong, message in problems(settled) if settled is not recipe else ():
        if wrong:
            raise RecipeError(f"{recipe.path}: {message}")
    return settled


def _settle(recipe: Recipe, role: str, stored: QuantizedSource | None) -> Recipe:
    source, asked = recipe.sources[role], recipe.engine.precision
    if source.weight_only and (stored is None or isinstance(stored, GgufFile)):
        raise RecipeError(
            f"{recipe.path}: {role}.weight_only is true, and {source.checkpoint} is not a folder "
            "of quantized weights; remove it"
        )
    key = f"{recipe.path}: {role if source.precision else 'engine'}.precision"
    asked = source.precision or asked
    if stored is None or not stored.quantized:
        if asked == STORED:
            raise RecipeError(
                f"{key} is {STORED!r}, and the weights of {source.checkpoint} are floats; set "
                f"{role}.precision to one of {', '.join(PRECISIONS)}"
            )
        return recipe
    try:
        stored.check_kept()
    except CheckpointError as error:
        raise CheckpointError(f"{recipe.path}: {role}.checkpoint: {error}") from error
    if asked not in ("", STORED):
        raise RecipeError(
            f"{key} is {asked!r}, and {source.checkpoint} is quantized already "
            f"({stored.formats()}); set {role}.precision to {STORED!r} to keep it as it is, or "
            "build from the model's floats"
        )
    if source.bits:
        raise RecipeError(
            f"{recipe.path}: {role}.bits is {source.bits!r}, and {source.checkpoint} is quantized "
            f"already ({stored.formats()}); remove it, and its bound, to keep that as it is, or "
            "build from the model's floats"
        )
    if STORED not in recipe.models[role].spec.precisions:
        raise RecipeError(
            f"{recipe.path}: {role}.checkpoint: {source.checkpoint} is quantized "
            f"({stored.formats()}), and the operators of {recipe.models[role].backend} do not take "
            "its codes and scales as they are; build for ort-cpu, or from the model's floats"
        )
    kept = replace(source, precision=STORED)
    return replace(recipe, target=kept) if role == "target" else replace(recipe, draft=kept)


def parse(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises: RecipeError.
    """
    try:
        return parse_text(read_file(path).decode("utf-8-sig"), path)
    except FileNotFoundError:
        raise RecipeError(f"{path} does not exist; {_EXPECTED}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise RecipeError(f"{path} is not UTF-8 text ({byte}); {_EXPECTED}") from None
    except (OSError, ValueError) as error:
        inside = [*path.glob("recipe.toml"), *path.glob("*/recipe.toml")] if path.is_dir() else []
        remedy = f"name a recipe in it, such as {min(inside)}" if inside else _EXPECTED
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RecipeError(f"{path} cannot be read: {reason}; {remedy}") from error


def parse_text(text: str, path: Path) -> dict[str, Any]:
    """Read TOML; `path` is named in errors.

    Raises: RecipeError.
    """
    try:
        return tomllib.loads(text)
    # Besides its own errors tomllib passes on those of int() and of deep nesting.
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path} cannot be read as TOML ({error}); {_EXPECTED}") from error


_EXPECTED = "a recipe is a TOML file, such as engines/codelet/recipe.toml"

MOST_CANDIDATES = 3840
"""TensorRT's limit for the best of a row."""

_BLOCKED = ("int8", "int4")

_QUANTIZERS = ("search", "gptq")

Problems = Iterator[tuple[bool, str]]


def problems(recipe: Recipe) -> Problems:
    """Yield, for each thing that can be wrong, whether it is, and what to say of it."""
    yield from _checkpoints(recipe)
    yield from _engine(recipe)
    yield from _tensorrt(recipe)
    yield from _weights(recipe)
    yield from _bits(recipe)
    yield from _quantizers(recipe)
    yield from _quality(recipe)


def _checkpoints(recipe: Recipe) -> Problems:
    for role, source in recipe.sources.items():
        places = (recipe.folder / source.checkpoint, Path(source.checkpoint).expanduser())
        there = any(place.is_dir() or place.suffix == SUFFIX for place in places)
        yield (
            not source.checkpoint or (not is_hub_name(source.checkpoint) and not there),
            f"{role}.checkpoint is {repr(source.checkpoint) if source.checkpoint else 'missing'}; "
            "expected a folder or a GGUF file next to the recipe, or a hub name as 'owner/model'",
        )

    yield (
        recipe.target.kind != "",
        f"target.kind is {recipe.target.kind!r}; it is a draft's, in [draft]",
    )
    yield (
        bool(recipe.target.layers),
        "target.layers is set; it is a head's, in [draft]: the layers of the target that it reads",
    )
    least = recipe.quality.min_acceptance
    yield (not 0 <= least <= 1, f"quality.min_acceptance is {least}; expected a share from 0 to 1")


def _engine(recipe: Recipe) -> Problems:
    name, e = recipe.name, recipe.engine
    folder = name.isprintable() and "/" not in name and name[:1] not in ("", ".")
    yield not folder or len(name) > 255, f"name is {name!r}; expected a plain folder name"
    named = {"engine": e.backend, **{r: s.backend for r, s in recipe.sources.items() if s.backend}}
    for where, backend in named.items():
        yield (
            backend not in COMPILERS,
            f"{where}.backend is {backend!r}; this version builds {', '.join(COMPILERS)}",
        )
    for role in recipe.sources:
        most = recipe.models[role].spec.most_rows
        yield (
            not 1 <= e.batch <= most,
            f"engine.batch is {e.batch}, and {recipe.models[role].backend} builds "
            f"{f'1 to {most}' if most > 1 else 'batch 1'}; change it, or the backend",
        )
    yield (
        e.gamma not in (AUTO, 0, *e.gammas),
        f"engine.gamma is {e.gamma}; expected {AUTO!r}, 0 or one of engine.gammas {list(e.gammas)}",
    )
    drafters = available_drafters(has_model=recipe.draft is not None)
    yield (
        e.drafter not in ("", *drafters),
        f"engine.drafter is {e.drafter!r}; expected one of {', '.join(drafters)}"
        + ("" if recipe.draft else ", without [draft]"),
    )
    yield (
        e.prefill > e.max_length,
        f"engine.prefill is {e.prefill}; expected 1 to max_length ({e.max_length})",
    )
    yield (
        e.widest > e.max_length,
        f"engine.gammas reaches {e.widest - 1}; a pass of {e.widest} does not fit {e.max_length}",
    )


def _tensorrt(recipe: Recipe) -> Problems:
    options, engine = recipe.tensorrt, recipe.engine
    least = max(2, engine.widest)
    yield (
        not 0 <= options.candidates <= MOST_CANDIDATES,
        f"tensorrt.candidates is {options.candidates}; expected 0 to {MOST_CANDIDATES}",
    )
    yield (
        bool(options.version)
        and re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}(\.[0-9.]*)?", options.version) is None,
        f"tensorrt.version is {options.version!r}; expected one such as '10.3'",
    )
    known = OLDEST <= parse_version(options.version)[:2] < (LAST_MAJOR + 1,)
    yield (
        bool(options.version) and not known,
        f"tensorrt.version is {options.version!r}; graphs are written for TensorRT "
        f"{'.'.join(map(str, OLDEST))} to {LAST_MAJOR}.x",
    )
    lengths = options.kv_lengths
    yield (
        any(a >= b for a, b in pairwise((0, *lengths, engine.max_length))),
        f"tensorrt.kv_lengths is {list(lengths)}; expected rising lengths from 1 to less than "
        f"engine.max_length ({engine.max_length})",
    )
    old = options.version and parse_version(options.version)[:2] < NATIVE_FROM
    yield (
        bool(lengths and old),
        f"tensorrt.kv_lengths is {list(lengths)}, and before TensorRT "
        f"{'.'.join(map(str, NATIVE_FROM))} passes write whole KV buffers; remove it",
    )
    yield (
        any(recipe.models[role].spec.pads_tail for role in recipe.sources)
        and engine.prefill < least,
        f"engine.prefill is {engine.prefill}; with TensorRT passes near the length limit go "
        f"through it, so expected {least} or more",
    )


_FP8_KEPT = (
    ". It keeps the fp8 of a checkpoint that holds it; of floats take int8, which has as many bits "
    "and whose products have kernels of whole numbers"
)


def _weights(recipe: Recipe) -> Problems:
    for role, source in recipe.sources.items():
        backend = recipe.models[role].backend
        known = recipe.models[role].spec.precisions
        own = f"{role}.precision" if source.precision else "engine.precision"
        values = {own: source.precision or recipe.engine.precision or STORAGE[0]}
        kept = values[own] == STORED
        for key in ("embedding", "head"):
            value = getattr(source, key)
            yield (
                value == STORED or (kept and value != ""),
                f"{role}.{key} is {value!r}, and {own} {values[own]!r}; {STORED!r} is for all of a "
                f"model, remove {role}.{key}",
            )
        values |= {f"{role}.{key}": getattr(source, key) for key in ("embedding", "head")}
        for key, value in values.items():
            yield (
                value not in known and (value != "" or key == own),
                f"{key} is {value!r}; {backend} builds {', '.join(known)}"
                + (_FP8_KEPT if value == "fp8" and STORED in known else ""),
            )
    common = recipe.engine.precision
    yield (
        common not in ("", *PRECISIONS, STORED),
        f"engine.precision is {common!r}; expected one of {', '.join((*PRECISIONS, STORED))}",
    )
    for role, model in recipe.models.items():
        block, precision = model.source.block, model.precision
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
            f"{role}.block is {block}, and {model.backend} keeps one scale for each row of "
            f"{' and '.join(PER_ROW)}; remove it",
        )


def _bits(recipe: Recipe) -> Problems:
    for role, source in recipe.sources.items():
        bounds = {"max_kl": source.max_kl, "max_bytes": source.max_bytes}
        named = [key for key, value in bounds.items() if value is not None]
        yield (
            bool(source.bits) and len(named) != 1,
            f"{role}.bits is {source.bits!r}, and {' and '.join(named) or 'no bound'} is set; "
            f"expected one of {role}.max_kl (nats) and {role}.max_bytes (of the weights)",
        )
        yield (
            bool(named) and not source.bits,
            f"{role}.{' and '.join(named)} is a bound for bits that are chosen; add "
            f"{role}.bits = {AUTO_BITS!r}, or set quality.max_kl to refuse a model beyond it",
        )
        yield (
            bool(source.bits) and source.precision not in ("", "int4"),
            f"{role}.precision is {source.precision!r}, and {role}.bits {source.bits!r} chooses "
            f"between int4 and int8; remove one of both",
        )
        yield (
            source.max_kl is not None and not source.max_kl > 0,
            f"{role}.max_kl is {source.max_kl}; expected more than 0 nats",
        )
        yield (
            source.max_bytes is not None and source.max_bytes < 1,
            f"{role}.max_bytes is {source.max_bytes}; expected bytes, 1 or more",
        )


def _quantizers(recipe: Recipe) -> Problems:
    for role, model in recipe.models.items():
        yield (
            not model.source.symmetric and "int4" not in model.precision.names,
            f"{role}.symmetric is false, and nothing of the {role} is int4; remove it, or set a "
            "precision of int4",
        )
        yield (
            not model.source.symmetric and STORED not in model.spec.precisions,
            f"{role}.symmetric is false, and the int4 of {model.backend} has no zeros; "
            "remove it, or build for ort-cpu",
        )
    named = {"engine": recipe.engine.quantizer}
    named |= {role: source.quantizer for role, source in recipe.sources.items() if source.quantizer}
    for where, quantizer in named.items():
        yield (
            quantizer not in _QUANTIZERS,
            f"{where}.quantizer is {quantizer!r}; expected {' or '.join(_QUANTIZERS)}",
        )
        asked = recipe.sources if where == "engine" else (where,)
        yield (
            quantizer == "gptq" and not any(recipe.models[r].precision.calibrated for r in asked),
            f"{where}.quantizer is 'gptq', and no layers or head of the {' and '.join(asked)} are "
            "int4; remove it, or set a precision of int4",
        )


def _is_coded(recipe: Recipe, role: str) -> bool:
    """Tell whether a model is a checkpoint on this machine that is quantized already."""
    place = recipe.folder / recipe.sources[role].checkpoint
    if not place.exists():
        return False
    with suppress(CheckpointError):  # which is said when it is opened for a build
        found = Checkpoint.open(place, config_only=True, weight_only=True).source
        return found is not None and found.quantized
    return False


def _quality(recipe: Recipe) -> Problems:
    q = recipe.quality
    quantized = [role for role, model in recipe.models.items() if model.precision.quantizes]
    if not q.calibration:  # of codes another thing is wrong, and settling says it
        quantized = [role for role in quantized if not _is_coded(recipe, role)]
    yield (
        bool(quantized) and not q.calibration,
        f"quality.calibration is missing, and the {' and '.join(quantized)} would be quantized; "
        "name a text next to the recipe to measure on, of the kind the models will meet, as "
        '`[quality]` with `calibration = "calibration.jsonl"`',
    )
    limits = [key for key in ("max_kl", "min_top1") if getattr(q, key) is not None]
    stored = [role for role, model in recipe.models.items() if model.precision.rewrites]
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
