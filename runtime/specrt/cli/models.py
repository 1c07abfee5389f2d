"""`specrt pull`, `specrt list` and `specrt rm`: weights of the hub and bundles on this machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from specrt.bundle import Manifest
from specrt.cli.build import installed
from specrt.cli.cache import bundles
from specrt.cli.names import HubName, fetch, hub_models, look_up
from specrt.cli.options import table
from specrt.errors import BuildError, RequestError
from specrt.system.memory import size


@click.command("pull")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--revision", help="Branch, tag or commit of a model.")
def pull(names: tuple[str, ...], revision: str | None) -> None:
    """Fetch the weights of NAME: a pair (`specrt list`), org/name of the hub, or org/name:Q8_0.

    They come into the cache that huggingface_hub uses. A download that was interrupted goes on
    where it was, and every file is compared with the hash that the hub lists. HF_TOKEN,
    HF_ENDPOINT (a mirror), HF_HOME and HF_HUB_OFFLINE are heeded.
    """
    models = list(dict.fromkeys(found for name in names for found in hub_models(name)))
    with installed():
        snapshots = [look_up(found, revision) for found in models]
        folders = fetch(snapshots)
    for found, folder in zip(models, folders, strict=True):
        print(f"{found}: {folder}")
    if not models:
        print(f"{' and '.join(names)}: the weights come with the recipe")


@dataclass(frozen=True)
class Listed:
    """A pair or a model, and what is here of it."""

    name: str
    models: list[str]
    """The target first."""
    weight_bytes: int
    """Of the hub's files that are here."""
    whole: bool
    """Whether the weights of all models are."""
    bundles: list[str]

    @property
    def weights(self) -> str:
        """What is said of the weights."""
        if not self.weight_bytes:
            return "here" if self.whole else "-"
        return size(self.weight_bytes) if self.whole else f"{size(self.weight_bytes)}, in part"


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def list_models(as_json: bool) -> None:
    """List the pairs that specrt knows, and the weights and bundles that are on this machine."""
    rows = [*_pairs(), *_others()]
    if as_json:
        print("\n".join(json.dumps(asdict(row)) for row in rows))
        return
    cells = [
        (row.name, ", ".join(row.models), row.weights, ", ".join(row.bundles) or "-")
        for row in rows
    ]
    print(table(("name", "target, draft", "weights", "bundles"), cells, left=4))


def _pairs() -> Iterator[Listed]:
    from specrt_export.checkpoint.ready_recipes import checkpoints_of, hub_names_of, ready_recipes

    for name, recipe in ready_recipes().items():
        remote = hub_names_of(recipe)
        yield Listed(
            name, checkpoints_of(recipe), sum(map(_bytes, remote)), all(map(_is_whole, remote)),
            [str(path) for path in _bundles_of(name)],
        )  # fmt: skip


def _others() -> Iterator[Listed]:
    """Yield the models of no pair that are here, and bundles of neither."""
    from specrt_export.checkpoint.hub_cache import cached_models
    from specrt_export.checkpoint.ready_recipes import ready_hub_names, ready_recipes

    pairs = ready_recipes()
    known = {path for name in pairs for path in _bundles_of(name)}
    for model in cached_models():
        if model not in ready_hub_names() and _bytes(model):
            built = [path for path in _bundles_of(model, [HubName(model)]) if path not in known]
            known |= {*built}
            yield Listed(model, [model], _bytes(model), _is_whole(model), [*map(str, built)])
    for path, manifest in bundles():
        if path not in known:
            yield Listed(manifest.name, [], 0, False, [str(path)])


def _bytes(model: str) -> int:
    from specrt_export.checkpoint.hub_cache import weights_bytes

    return weights_bytes(model)


def _is_whole(model: str) -> bool:
    """Tell whether the weights of a model are here, as safetensors or in a GGUF file."""
    from specrt_export.checkpoint.hub_cache import cached_snapshot, has_weights

    folder = cached_snapshot(model)
    return folder is not None and (has_weights(folder) or any(folder.glob("*.gguf")))


def _bundles_of(name: str, models: Sequence[HubName] = ()) -> list[Path]:
    """Return the bundles of a name, or those whose target is one of some models."""
    hubs = {found.model for found in models if not found.form}
    files = {path.name for found in models if found.form for path in _gguf_files(found)}
    return [path for path, manifest in bundles() if _is_of(manifest, name, hubs, files)]


def _is_of(manifest: Manifest, name: str, hubs: set[str], files: set[str]) -> bool:
    origin = manifest.origins.get("target")
    built = origin is not None and (origin.hub in hubs or not files.isdisjoint(origin.files))
    return built or manifest.name in (name, f"{name}-gpu")


def _gguf_files(found: HubName) -> list[Path]:
    from specrt_export.checkpoint.hub import gguf_files
    from specrt_export.checkpoint.hub_cache import cached_snapshot

    folder = cached_snapshot(found.model)
    return [] if folder is None else gguf_files(folder, found.form)


@click.command("rm")
@click.argument("name")
@click.option("--weights", is_flag=True, help="Only what was fetched from the hub.")
@click.option("--bundles", "built", is_flag=True, help="Only what was built.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(name: str, weights: bool, built: bool, yes: bool) -> None:
    """Remove the weights and bundles of NAME: a pair, a bundle, org/name of the hub or one file.

    Weights that another pair drafts or decodes with stay, if the target of that pair is here.
    """
    from specrt_export.checkpoint.ready_recipes import ready_recipes

    pair = name in ready_recipes()
    models = hub_models(name) if pair or not _bundles_of(name) else []
    kept = _used_elsewhere(name) if pair else {}
    gone: list[Path] = []
    if weights or not built:
        gone += [path for one in models if one.model not in kept for path in _places(one)]
    if built or not weights:
        gone += _bundles_of(name, [] if pair else models)
    if not gone:
        raise RequestError(f"nothing of {name} is here to remove; `specrt list` lists what is")
    for model, user in kept.items():
        print(f"{model} stays: {user} uses it", file=sys.stderr)
    counted = {path: _size(path) for path in gone}
    for path, held in counted.items():
        print(f"{size(held):>10}  {path}")
    if not yes:
        _ask(name)
    for path in gone:
        _remove(path)
    print(f"removed {name}: {size(sum(counted.values()))} ({sum(counted.values())} bytes) are free")


def _used_elsewhere(name: str) -> dict[str, str]:
    """Return the models of a pair that another pair whose target is here needs, and that pair."""
    from specrt_export.checkpoint.ready_recipes import hub_names_of, ready_recipes

    recipes = ready_recipes()
    own = hub_names_of(recipes[name])
    others = {pair: hub_names_of(recipe) for pair, recipe in recipes.items() if pair != name}
    return {
        model: pair
        for pair, models in others.items()
        for model in models
        if model in own and models[0] not in own and _is_whole(models[0])
    }


def _places(found: HubName) -> list[Path]:
    """Return what is here of a model: all of it, or the files of one format."""
    from specrt_export.checkpoint.hub_cache import repository

    if found.form:
        return [place for file in _gguf_files(found) for place in (file.resolve(), file)]
    return [path for path in [repository(found.model)] if path.exists()]


def _size(path: Path) -> int:
    """Return the bytes of files; a link has none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(one.stat().st_size for one in files if one.is_file() and not one.is_symlink())


def _ask(name: str) -> None:
    if not sys.stdin.isatty():
        raise RequestError(f"removing {name} is asked about at a terminal only; add --yes")
    click.confirm("remove all of this?", abort=True, err=True)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(
            f"{error.filename or path} cannot be removed: {error.strerror}; remove it by hand"
        ) from error
