"""The TOML a bundle is built from, as frozen records; an unknown key names the nearest one."""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from specrt.errors import RecipeError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BACKENDS = ("ort-cpu",)
PRECISIONS = ("fp32",)


@dataclass(frozen=True)
class ModelSource:
    """Where one model of the pair comes from."""

    checkpoint: str
    """A folder beside the recipe, or a hub name."""
    revision: str = ""
    """Branch, tag or commit of a hub name."""
    graph: str = ""
    """A portable graph exported earlier, beside the recipe; exported now when empty."""


@dataclass(frozen=True)
class EngineOptions:
    """What the engines are built for."""

    backend: str = "ort-cpu"
    precision: str = "fp32"
    max_length: int = 2048
    """Positions of the KV buffers: prompt and completion together."""
    prefill: int = 256
    """Widest prefill pass, in tokens; a longer prompt goes through in several."""
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    """Every gamma a verify pass is built for; 0 always is."""
    gamma: int = 4
    """The gamma used when none is asked for."""


@dataclass(frozen=True)
class Recipe:
    """One bundle: a target, a draft, and what to build for them."""

    path: Path
    name: str
    target: ModelSource
    draft: ModelSource | None
    engine: EngineOptions

    @property
    def folder(self) -> Path:
        """Return the folder that relative names are relative to."""
        return self.path.parent


def read_recipe(path: Path, *, backend: str | None = None) -> Recipe:
    """Read and check a recipe; `backend` replaces the one it names.

    Raises: RecipeError naming the key, the value and what was expected.
    """
    data = _parse(path)
    folder = path.resolve().parent.name
    named = folder if path.stem == "recipe" else path.stem
    name = data.pop("name") if "name" in data else named
    if not isinstance(name, str):
        raise RecipeError(f"{path}: name is {name!r}; expected a string")
    tables = {key: _table(path, key, data.pop(key, {})) for key in ("target", "draft", "engine")}
    for key in data:
        known = ("name", "target", "draft", "engine")
        raise RecipeError(f"{path}: unknown key {key!r}{did_you_mean(key, known)}")
    if not tables["target"]:
        raise RecipeError(f"{path}: [target] is missing; it needs at least `checkpoint`")
    if backend:
        tables["engine"]["backend"] = backend
    draft = _record(path, "draft", ModelSource, tables["draft"]) if tables["draft"] else None
    recipe = Recipe(
        path=path,
        name=name,
        target=_record(path, "target", ModelSource, tables["target"]),
        draft=draft,
        engine=_record(path, "engine", EngineOptions, tables["engine"]),
    )
    _check(recipe)
    return recipe


def _parse(path: Path) -> dict[str, Any]:
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


def _table(path: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: {key} is {value!r}; expected a table [{key}]")
    return dict(value)


def _record(path: Path, table: str, kind: type[Any], values: dict[str, Any]) -> Any:
    """Build a frozen record from a TOML table, checking names and types."""
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}
    for key, value in values.items():
        if key not in known:
            shown = key if key.isprintable() else repr(key)
            raise RecipeError(f"{path}: unknown key {table}.{shown}{did_you_mean(key, known)}")
        expected = _EXPECTED[str(known[key].type)]
        if not expected.accepts(value):
            raise RecipeError(f"{path}: {table}.{key} is {value!r}; expected {expected.words}")
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise RecipeError(f"{path}: {table}.{name} is missing")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


@dataclass(frozen=True)
class _Expected:
    kind: type
    words: str
    many: bool = False

    def accepts(self, value: Any) -> bool:
        items = value if self.many and isinstance(value, list) else [value]
        fits = all(isinstance(i, self.kind) and not isinstance(i, bool) for i in items)
        return fits and isinstance(value, list) == self.many


_EXPECTED = {
    "str": _Expected(str, "a string"),
    "int": _Expected(int, "a whole number"),
    "tuple[int, ...]": _Expected(int, "a list of whole numbers", many=True),
}


def _check(recipe: Recipe) -> None:
    """Refuse values that no engine can be built for."""
    e = recipe.engine
    widest = max(e.gammas, default=0) + 1
    problems = [
        (not recipe.name.isprintable() or "/" in recipe.name or recipe.name[:1] in ("", ".")
         or len(recipe.name) > 255,
         f"name is {recipe.name!r}; expected a plain folder name"),
        (e.backend not in BACKENDS,
         f"engine.backend is {e.backend!r}; this version builds {', '.join(BACKENDS)}"),
        (e.precision not in PRECISIONS,
         f"engine.precision is {e.precision!r}; {e.backend} builds {', '.join(PRECISIONS)}"),
        (e.max_length < 2, f"engine.max_length is {e.max_length}; expected 2 or more"),
        (any(g < 0 for g in e.gammas),
         f"engine.gammas is {list(e.gammas)}; expected 0 or more each"),
        (e.gamma not in (0, *e.gammas),
         f"engine.gamma is {e.gamma}; expected 0 or one of engine.gammas {list(e.gammas)}"),
        (e.prefill < 1 or e.prefill > e.max_length,
         f"engine.prefill is {e.prefill}; expected 1 to max_length ({e.max_length})"),
        (widest > e.max_length,
         f"engine.gammas reaches {widest - 1}; a pass of {widest} does not fit {e.max_length}"),
        (recipe.draft is None and e.gamma > 0,
         f"engine.gamma is {e.gamma} without a [draft]; expected 0"),
    ]  # fmt: skip
    for wrong, message in problems:
        if wrong:
            raise RecipeError(f"{recipe.path}: {message}")
