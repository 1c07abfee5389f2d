"""The recipes that come with specrt, by name of their pair; read without what building needs."""

from __future__ import annotations

import re
from pathlib import Path

import specrt

FOLDER = Path(specrt.__file__).parent / "engines"
"""Where recipes are; in a clone a link to `engines`."""

_CHECKPOINT = re.compile(r'^checkpoint = "(.+)"$', re.MULTILINE)


def ready_recipes() -> dict[str, Path]:
    """Return the recipe of each pair, by name."""
    return {path.parent.name: path for path in sorted(FOLDER.glob("*/recipe.toml"))}


def checkpoints_of(recipe: Path) -> list[str]:
    """Return what a ready recipe names, the target first."""
    return _CHECKPOINT.findall(recipe.read_text(encoding="utf-8"))


def hub_names_of(recipe: Path) -> list[str]:
    """Return those that are not folders next to the recipe."""
    return [name for name in checkpoints_of(recipe) if not (recipe.parent / name).exists()]


def ready_hub_names() -> set[str]:
    """Return the models of the hub that any ready recipe names."""
    return {name for recipe in ready_recipes().values() for name in hub_names_of(recipe)}
