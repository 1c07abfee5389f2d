"""The TOML a bundle is built from, as frozen records; an unknown key names the nearest one."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from specrt.doctor import best_backend
from specrt.errors import RecipeError, did_you_mean
from specrt.models import AUTO, Gamma
from specrt_export.compile.tensorrt.options import PlanOptions
from specrt_export.lower.tensorrt import CANDIDATES
from specrt_export.problems import BACKENDS, TENSORRT, problems
from specrt_export.quantize.precision import Precision
from specrt_export.table import parse, record, table

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
