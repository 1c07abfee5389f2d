"""The recipes that come with specrt, by the name of their pair."""

from __future__ import annotations

import re
from pathlib import Path

_PLACES = (Path(__file__).parents[2] / "engines", Path(__file__).parent / "engines")
"""Where recipes are: in a clone, and in an installed package."""

_HUB_NAME = re.compile(r'^checkpoint = "([^"/]+/[^"/]+)"$', re.MULTILINE)


def ready_recipes() -> dict[str, Path]:
    """Return the recipe of each pair, by name."""
    found = [path for place in _PLACES for path in sorted(place.glob("*/recipe.toml"))]
    return {path.parent.name: path for path in reversed(found)}


def ready_checkpoints() -> set[str]:
    """Return the hub names that recipes have."""
    texts = [path.read_text(encoding="utf-8") for path in ready_recipes().values()]
    return {name for text in texts for name in _HUB_NAME.findall(text)}
