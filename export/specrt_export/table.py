"""TOML tables as frozen records: an unknown key names the nearest one, a value is of its type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from specrt.errors import RecipeError, did_you_mean
from specrt.models import AUTO

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
