"""The TOML a bundle is built from, as frozen records; an unknown key names the nearest one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from specrt.engine.tensorrt.library import OLDEST, TENSORRT, parse_version
from specrt.errors import RecipeError, did_you_mean
from specrt.params import AUTO, Gamma
from specrt.system.doctor import best_backend
from specrt_export.compile.tensorrt.builder_config import PlanOptions
from specrt_export.lower.tensorrt_lowering import CANDIDATES
from specrt_export.quantize.precision import BLOCKS, PER_ROW, PRECISIONS, Precision

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises: RecipeError.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise RecipeError(f"{path} does not exist; a recipe is a TOML file") from None
    except IsADirectoryError:
        raise RecipeError(
            f"{path} is a folder; name the recipe in it, {path}/recipe.toml"
        ) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text: {error.reason}") from None
    # Besides its own errors tomllib passes on those of int() and of deep nesting.
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} cannot be read as TOML: {error}") from error


def table(path: Path, key: str, value: Any) -> dict[str, Any]:
    """Return a copy of a table.

    Raises: RecipeError for what is none.
    """
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: {key} is {value!r}; expected a table [{key}]")
    return dict(value)


def record(path: Path, name: str, kind: type[Any], values: dict[str, Any]) -> Any:
    """Build a frozen record from the table of a name, checking keys and types.

    Raises: RecipeError naming the key, the value and what was expected.
    """
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}
    for key, value in values.items():
        if key not in known:
            shown = key if key.isprintable() else repr(key)
            raise RecipeError(f"{path}: unknown key {name}.{shown}{did_you_mean(key, known)}")
        accepts, words = _EXPECTED[str(known[key].type)]
        if not accepts(value):
            raise RecipeError(f"{path}: {name}.{key} is {value!r}; expected {words}")
    for key, field in known.items():
        if field.default is MISSING and key not in values:
            raise RecipeError(f"{path}: {name}.{key} is missing")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _is(*kinds: type) -> Callable[[Any], bool]:
    """Return a test for values of some types; True and False are no numbers."""
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


_is_int = _is(int)

_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (_is(str), "a string"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "int": (_is_int, "a whole number"),
    "int | None": (_is_int, "a whole number"),
    "float | None": (_is(int, float), "a number"),
    "Gamma": (lambda v: v == AUTO or _is_int(v), f"a whole number or {AUTO!r}"),
    "tuple[int, ...]": (
        lambda v: isinstance(v, list) and all(map(_is_int, v)),
        "a list of whole numbers",
    ),
    "tuple[str, ...]": (
        lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
        "a list of strings",
    ),
}
"""Per annotation of a field: what accepts its values, and what it is in words."""


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


_TABLES = ("target", "draft", "engine", "tensorrt", "quality")


@dataclass(frozen=True)
class ModelSource:
    """Where one model of the pair comes from."""

    checkpoint: str
    """A folder beside the recipe, or a hub name."""
    revision: str = ""
    """Branch, tag or commit of a hub name."""
    graph: str = ""
    """A portable graph exported earlier, beside the recipe; exported now when empty."""
    precision: str = ""
    """What weights are stored as; `engine.precision` when empty."""
    embedding: str = ""
    """The same for the embedding table; int8 in an int4 model, else `precision`, when empty."""
    head: str = ""
    """The same for the last projection."""
    block: int = 0
    """Weights that share a scale in int8 and int4; 32 when 0. With TensorRT in int4 alone, 128 when
    0: int8 and fp8 have one scale for each row there."""
    backend: str = ""
    """What runs this model; `engine.backend` when empty."""


@dataclass(frozen=True)
class EngineOptions:
    """What the engines are built for."""

    backend: str = "ort-cpu"
    """What runs the models; `auto` is the fastest that works on the machine that builds."""
    precision: str = "fp32"
    """What the weights of both models are stored as, unless their tables say otherwise."""
    batch: int = 1
    """Rows of text that an engine holds, each with KV buffers of its own: as many completions can
    share a pass. On a CPU a pass costs what the tokens of its rows cost, without padding."""
    max_length: int = 2048
    """Positions of the KV buffers: prompt and completion together."""
    prefill: int = 256
    """Widest prefill pass, in tokens; a longer prompt goes through in several."""
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    """Every gamma a verify pass is built for; 0 always is."""
    gamma: Gamma = AUTO
    """The gamma used when none is asked for; `auto` chooses one each round."""


@dataclass(frozen=True)
class TensorRtOptions(PlanOptions):
    """What only the TensorRT backends read."""

    candidates: int = CANDIDATES
    """Best scores of each row that are cut out on the device for sampling; 0 for none."""
    version: str = ""
    """The TensorRT that will parse the graphs, such as `10.3`: before 10.15 they are written out in
    simpler operators. The one installed when empty."""

    @property
    def plan(self) -> PlanOptions:
        """Return the builder's part."""
        return PlanOptions(**{f.name: getattr(self, f.name) for f in fields(PlanOptions)})


@dataclass(frozen=True)
class QualityOptions:
    """What quantized models are measured on, and how far from their checkpoints they may be."""

    calibration: str = ""
    """A text, or JSON lines with `prompt`, beside the recipe; the more like real use the better."""
    max_kl: float | None = None
    """Most nats of KL divergence, a mean over positions."""
    min_top1: float | None = None
    """Smallest share of positions where the likeliest token is the checkpoint's."""


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
    engine: EngineOptions
    quality: QualityOptions
    tensorrt: TensorRtOptions = TensorRtOptions()

    @property
    def folder(self) -> Path:
        """Return the folder that relative names are relative to."""
        return self.path.parent

    @property
    def sources(self) -> dict[str, ModelSource]:
        """Return the models there are, the target first."""
        both = {"target": self.target, "draft": self.draft}
        return {role: source for role, source in both.items() if source is not None}

    def backend_of(self, role: str) -> str:
        """Return what a model is built for."""
        return self.sources[role].backend or self.engine.backend

    @property
    def precisions(self) -> dict[str, Precision]:
        """Return what each model's weights are stored as."""
        return {
            role: Precision.of(
                source.precision or self.engine.precision,
                source.embedding,
                source.head,
                source.block,
                per_row=self.backend_of(role) in TENSORRT,
            )
            for role, source in self.sources.items()
        }


def read_recipe(path: Path, *, backend: str | None = None) -> Recipe:
    """Read and check a recipe; `backend` replaces those it names, the models' own too.

    Raises: RecipeError naming the key, the value and what was expected.
    """
    data = parse(path)
    folder = path.resolve().parent.name
    named = folder if path.stem == "recipe" else path.stem
    name = data.pop("name") if "name" in data else named
    if not isinstance(name, str):
        raise RecipeError(f"{path}: name is {name!r}; expected a string")
    tables = {key: table(path, key, data.pop(key, {})) for key in _TABLES}
    for key in data:
        raise RecipeError(f"{path}: unknown key {key!r}{did_you_mean(key, ('name', *_TABLES))}")
    if not tables["target"]:
        raise RecipeError(f"{path}: [target] is missing; it needs at least `checkpoint`")
    if backend:
        tables["engine"]["backend"] = backend
    target = record(path, "target", ModelSource, tables["target"])
    draft = record(path, "draft", ModelSource, tables["draft"]) if tables["draft"] else None
    if backend:
        target, draft = replace(target, backend=""), draft and replace(draft, backend="")
    recipe = Recipe(
        path=path,
        name=name,
        target=target,
        draft=draft,
        engine=record(path, "engine", EngineOptions, tables["engine"]),
        quality=record(path, "quality", QualityOptions, tables["quality"]),
        tensorrt=record(path, "tensorrt", TensorRtOptions, tables["tensorrt"]),
    )
    if recipe.engine.backend == AUTO:
        recipe = replace(recipe, engine=replace(recipe.engine, backend=_best_here(recipe)))
    _check(recipe)
    return recipe


def _best_here(recipe: Recipe) -> str:
    """Return the fastest backend of this machine that has engines for what the recipe asks."""
    best = best_backend()
    asked = {
        n for r, s in recipe.sources.items() if not s.backend for n in recipe.precisions[r].names
    }
    fits = asked <= set(BACKENDS[best]) and (recipe.engine.batch == 1 or best != "ort-cuda")
    return best if fits else "ort-cpu"


def _check(recipe: Recipe) -> None:
    """Refuse values that no engine can be built for."""
    for wrong, message in problems(recipe):
        if wrong:
            raise RecipeError(f"{recipe.path}: {message}")
