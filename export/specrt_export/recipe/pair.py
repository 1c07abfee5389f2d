"""Two checkpoints that are named without a recipe, and the recipe that says the same."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from specrt.errors import CheckpointError, RecipeError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.hub_cache import is_hub_name
from specrt_export.precision import SCALED, STORED
from specrt_export.recipe.recipe import Recipe, parse_text, recipe_of
from specrt_export.recipe.recipe_tables import DRAFTS, EngineOptions

UNWRITTEN = Path("command line")
"""What errors name in place of a recipe's file; the checkpoints lie next to it, as they were named.
"""


@dataclass(frozen=True)
class CheckpointPair:
    """A target, and a draft for it; what is empty is left to the recipe's defaults."""

    target: str
    """A folder, a GGUF file, or a hub name."""
    draft: str = ""
    """The same, or one of `DRAFTS`; without one a head in the target's checkpoint drafts, or lookup
    in the text so far."""
    precision: str = ""
    """Of the checkpoints that hold floats; a quantized one is kept as it is."""
    backend: str = ""
    max_length: int = 0
    """The default, or the positions that both models were trained for if these are fewer, when 0.
    """
    calibration: str = ""
    """A text on this machine."""
    weight_only: bool = False
    """Of folders that quantize activations, too: whether to leave that out."""

    def recipe(self, file: Path | None = None) -> tuple[Recipe, str]:
        """Return the recipe and its text; `file` is where the text is going to be.

        Of a hub name the configuration is fetched. Nothing is written.
        Raises: CheckpointError, RecipeError.
        """
        place = file or UNWRITTEN
        text = "\n".join(self._lines(place))
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RecipeError(
                f"a name of {self.target!r} and {self.draft!r} is not UTF-8, and a recipe is; "
                "rename the file"
            ) from None
        return recipe_of(parse_text(text, place), place), text

    def _lines(self, place: Path) -> list[str]:
        kind = self.draft if self.draft in DRAFTS and not Path(self.draft).exists() else ""
        sources = {"target": self.target, **({"draft": self.draft} if self.draft != kind else {})}
        looked = {role: _look(role, name, self.weight_only) for role, name in sources.items()}
        if self.weight_only and all(one.scheme is None for one in looked.values()):
            raise RecipeError(
                f"--weight-only is for folders of quantized weights, and {' and '.join(sources)} "
                "are none; leave it out"
            )
        meant = self._meant(looked)
        common = self.precision if len(meant) == len(sources) else ""
        lines = [f"name = {_quoted(_name(self.target))}", ""]
        for role, name in sources.items():
            lines += [f"[{role}]", f"checkpoint = {_quoted(_beside(name, place))}"]
            if self.precision and not common and role in meant:
                lines.append(f"precision = {_quoted(self.precision)}")
            if self.weight_only and looked[role].scheme is not None:
                lines.append("weight_only = true")
            lines.append("")
        lines += ["[draft]", f"kind = {_quoted(kind)}", ""] if kind else []
        length = self.max_length or min(map(_positions, looked.values()))
        engine = [
            f"{key} = {value}"
            for key, value, wanted in (
                ("backend", _quoted(self.backend), self.backend),
                ("precision", _quoted(common), common),
                ("max_length", length, self.max_length or length < EngineOptions.max_length),
                ("prefill", length, length < EngineOptions.prefill),
            )
            if wanted
        ]
        if engine:
            lines += ["[engine]", *engine, ""]
        if self.calibration:
            lines += ["[quality]", f"calibration = {_quoted(_beside(self.calibration, place))}", ""]
        return lines

    def _meant(self, looked: dict[str, Checkpoint]) -> list[str]:
        """Return the models that `precision` is for.

        Raises: RecipeError where there is none, and where quantizing lacks a text to measure on.
        """
        sources = {role: one.source for role, one in looked.items()}
        coded = {role: s for role, s in sources.items() if s is not None and s.quantized}
        if self.precision == STORED:
            return [*coded] or [*looked]
        meant = [role for role in looked if role not in coded]
        if self.precision and not meant:
            named = " and ".join(f"{looked[r].origin} ({s.formats()})" for r, s in coded.items())
            raise RecipeError(
                f"--precision is {self.precision!r}, and what it is for is quantized already: "
                f"{named}; leave it out to keep that as it is, or build from the model's floats"
            )
        if self.precision in SCALED and not self.calibration:
            raise RecipeError(
                f"--precision {self.precision} needs --calibration F: a text to measure on, of the "
                "kind that the models will meet"
            )
        return meant


def _look(role: str, name: str, weight_only: bool) -> Checkpoint:
    try:
        return Checkpoint.open(name, config_only=True, weight_only=weight_only)
    except CheckpointError as error:
        raise CheckpointError(f"{role}: {error}") from error


def _positions(checkpoint: Checkpoint) -> int:
    """Return the positions that a model is built for: the default, or fewer."""
    trained = checkpoint.config.get("max_position_embeddings")
    most = EngineOptions.max_length
    return min(most, trained) if type(trained) is int and trained > 1 else most


def _beside(name: str, place: Path) -> str:
    """Return a name as it is seen from where the recipe is; hub names are the same everywhere."""
    path = Path(name).expanduser()
    if place == UNWRITTEN or path.is_absolute() or (not path.exists() and is_hub_name(name)):
        return str(path)
    # Of resolved folders: `..` after a link leads elsewhere.
    return os.path.relpath(path.parent.resolve() / path.name, place.parent.resolve())


def _name(target: str) -> str:
    """Return what a bundle is called: after the file, the folder or the model."""
    path = Path(target).expanduser()
    name = path.stem if path.suffix == ".gguf" else path.resolve().name
    return re.sub(r"[^\w.+-]+", "-", name)[:100].strip(".-") or "pair"


def _quoted(text: str) -> str:
    """Return a string of TOML."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
