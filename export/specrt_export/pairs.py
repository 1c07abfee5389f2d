"""The pairs whose weights are on this machine, and how to get the others; `make engines` asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import click

from specrt.errors import SpecrtError
from specrt_export.estimate import ModelShape, cached_file, find_config, size
from specrt_export.recipe import ModelSource, Recipe, read_recipe

GATED = ("meta-llama/", "google/gemma-")
"""How the hub names begin whose owners ask that their terms are accepted first."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

_STORED_BYTES = 2
"""Of a weight on the hub: these checkpoints are stored as bf16."""


def can_build(recipe: Recipe) -> bool:
    """Tell whether a recipe builds without a download: weights are here, and what exports them."""
    sources = recipe.sources.values()
    exports = find_spec("torch") is not None
    return all(weights_are_here(recipe, s) and (bool(s.graph) or exports) for s in sources)


def weights_are_here(recipe: Recipe, source: ModelSource) -> bool:
    """Tell whether the weights of a model lie beside the recipe or in the hub's cache."""
    local = recipe.folder / source.checkpoint
    if local.is_dir():
        return _is_whole(local)
    config = cached_file(source, "config.json")
    return config is not None and _is_whole(config.parent)


def _is_whole(folder: Path) -> bool:
    """Tell whether a checkpoint has all its files; a download that broke off leaves some."""
    if not (folder / "config.json").exists() or not (folder / "tokenizer.json").exists():
        return False
    if (folder / _SINGLE).exists():
        return True
    try:
        shards = set(
            json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(shards) and all((folder / str(shard)).exists() for shard in shards)


def how_to_get(recipe: Recipe) -> str:
    """Return one line on what building a pair would download."""
    missing = {
        role: source.checkpoint
        for role, source in recipe.sources.items()
        if not weights_are_here(recipe, source)
    }
    if not missing:
        return "the weights are here, what exports them is not"
    facts = [*_download(recipe, list(missing))]
    facts += ["gated"] if any(name.startswith(GATED) for name in missing.values()) else []
    return " and ".join(missing.values()) + (f" ({', '.join(facts)})" if facts else "")


def _download(recipe: Recipe, roles: Sequence[str]) -> Iterator[str]:
    """Yield about how much some models are, where their sizes are known."""
    with suppress(SpecrtError):
        shapes = [ModelShape.from_config(*find_config(recipe, role)) for role in roles]
        yield size(_STORED_BYTES * sum(shape.parameters for shape in shapes))


def main(paths: Sequence[str]) -> int:
    """Print the recipes that can be built now; on standard error, a line for each of the others."""
    others = []
    for path in map(Path, paths):
        try:
            recipe = read_recipe(path)
        except SpecrtError as error:
            click.echo(f"specrt: {error}", err=True)
            return 2
        if can_build(recipe):
            click.echo(path)
        else:
            others.append(f"  {path.resolve().parent.name:13} {how_to_get(recipe)}")
    if others:
        gpu = " BACKEND=tensorrt-rtx" if Path(paths[0]).stem == "tensorrt" else ""
        click.echo(
            f"not here yet; `make engines PAIR=NAME{gpu}` downloads what is missing and builds\n"
            "(gated: accept the terms on the hub first, then `hf auth login`):",
            err=True,
        )
        click.echo("\n".join(others), err=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
