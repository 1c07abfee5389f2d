"""Names as people type them: of ready pairs, of models on the hub, and of one GGUF file there."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specrt.cli.options import GGUF, is_checkpoint, progress
from specrt.doctor import check_exporter
from specrt.errors import CheckpointError, did_you_mean
from specrt.system.memory import size

if TYPE_CHECKING:
    from specrt_export.checkpoint.hub import Snapshot
    from specrt_export.recipe.recipe import Recipe

_HUB = re.compile(
    r"(?P<hub>(?:https?:/+)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<model>[\w-][\w.-]*/[\w.-]+?)(?::(?P<form>[\w.-]+))?/?"
)

_SHOW_S = 0.1
"""Between two states of a download that are shown."""


class HubName(NamedTuple):
    """A model on the hub, or what one GGUF file of its repository holds."""

    model: str
    form: str = ""
    """Format of the file, such as `Q8_0`; empty for a folder of safetensors."""

    def __str__(self) -> str:
        return f"{self.model}:{self.form}" if self.form else self.model


class NamedCheckpoint(NamedTuple):
    """What a recipe calls a checkpoint, and where it is on this machine."""

    source: str
    path: Path


def hub_name(text: str) -> HubName | None:
    """Return the model that a text names on the hub; None for a path.

    What is here, and what would be in a folder that is here, is a path.
    """
    found, path = _HUB.fullmatch(text), Path(text)
    if found is None or path.suffix == GGUF or path.exists():
        return None
    if not found["hub"] and path.parent.is_dir():
        return None
    return HubName(found["model"], found["form"] or "")


def ready_recipe(text: str) -> Path | None:
    """Return the recipe of a ready pair; None for another name, and for a path that is here."""
    from specrt_export.checkpoint.ready_recipes import ready_recipes

    return None if Path(text).exists() else ready_recipes().get(text)


def hub_models(text: str) -> list[HubName]:
    """Return what a name stands for on the hub: the models of a pair, or one.

    Raises: CheckpointError for a name that is neither.
    """
    from specrt_export.checkpoint.ready_recipes import hub_names_of, ready_recipes

    recipe = ready_recipes().get(text)
    if recipe is not None:
        return [HubName(name) for name in hub_names_of(recipe)]
    found = hub_name(text)
    if found is None:
        raise CheckpointError(
            f"{text!r} is neither a pair nor of the hub (org/name; org/name:Q8_0 for a GGUF file)"
            f"{did_you_mean(text, ready_recipes())}"
        )
    return [found]


def is_named_checkpoint(path: Path) -> bool:
    """Tell whether a text stands for a checkpoint: one that is here, or on the hub."""
    return is_checkpoint(path) or hub_name(str(path)) is not None


def checkpoint_source(text: str) -> str:
    """Return what a recipe calls a checkpoint; of a GGUF file of the hub where it is, fetched.

    The name of a ready pair stands for its target.
    """
    from specrt_export.checkpoint.ready_recipes import checkpoints_of, hub_names_of

    recipe = ready_recipe(text)
    if recipe is not None:
        target = checkpoints_of(recipe)[0]
        return target if target in hub_names_of(recipe) else str(recipe.parent / target)
    found = hub_name(text)
    if found is None:
        return text
    return str(_found(found)) if found.form else found.model


def find_checkpoint(text: str) -> NamedCheckpoint:
    """Return a checkpoint that a text names; one of the hub is fetched unless it is here.

    Raises: SpecrtError.
    """
    source = checkpoint_source(text)
    found = hub_name(source)
    return NamedCheckpoint(source, Path(source) if found is None else _found(found))


def fetch_missing(models: Sequence[HubName]) -> None:
    """Fetch the models that are not here, where something can build from them.

    Raises: SpecrtError.
    """
    lacking = [one for one in models if _place(one) is None]
    if lacking:
        check_exporter()
        fetch([look_up(one) for one in lacking])


def _found(model: HubName) -> Path:
    fetch_missing([model])
    place = _place(model)
    assert place is not None
    return place


def _place(model: HubName) -> Path | None:
    """Return the folder or the GGUF file of a model that is here whole; else None."""
    from specrt_export.checkpoint.hub import gguf_files
    from specrt_export.checkpoint.hub_cache import cached_snapshot, has_weights

    folder = cached_snapshot(model.model)
    if folder is None or not model.form:
        return folder if folder is not None and has_weights(folder) else None
    return next(iter(gguf_files(folder, model.form)), None)


def look_up(found: HubName, revision: str | None = None) -> Snapshot:
    """Ask the hub for the files that building needs of a model.

    Raises: CheckpointError.
    """
    from specrt_export.checkpoint.hub import WANTED_FILES, gguf_snapshot, look_up

    if found.form:
        return gguf_snapshot(found.model, found.form)
    return look_up(found.model, revision, WANTED_FILES)


def fetch(snapshots: Sequence[Snapshot]) -> list[Path]:
    """Receive what is missing of some models, and show how it goes; return their folders.

    Raises: CheckpointError.
    """
    from specrt_export.checkpoint.hub_cache import cache

    missing = [sum(file.bytes for file in one.missing) for one in snapshots]
    rest, total = sum(one.missing_bytes for one in snapshots), sum(missing)
    if not total:
        return [one.fetch() for one in snapshots]
    names = " and ".join(one.model for one, lacks in zip(snapshots, missing, strict=True) if lacks)
    begun = f" of {size(total)}, the rest is here" if rest < total else ""
    print(f"downloading {size(rest)}{begun}: {names}, into {cache()}", file=sys.stderr, flush=True)
    folders = []
    with progress("pull", steady=True, total_bytes=total) as show:
        for number, one in enumerate(snapshots):
            folders.append(one.fetch(_shown(show, one.model, sum(missing[:number]), total)))
    return folders


def _shown(
    show: Callable[[float, str], None], stage: str, before: int, total: int
) -> Callable[[int, int], None]:
    """Return what shows the bytes of one of several models."""
    last = 0.0

    def shown(done: int, of: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == of or now - last >= _SHOW_S:
            last = now
            show((before + done) / total, stage)

    return shown


def fetch_sources(plan: Recipe) -> None:
    """Receive what a recipe names on the hub and is missing, before anything is built.

    Raises: SpecrtError.
    """
    models = {(s.checkpoint, s.revision): s for s in plan.sources.values()}.values()
    remote = [one for one in models if not _is_local(plan, one.checkpoint)]
    snapshots = [look_up(HubName(one.checkpoint), one.revision or None) for one in remote]
    if any(one.missing for one in snapshots) and not all(one.graph for one in remote):
        check_exporter()
    fetch(snapshots)


def _is_local(plan: Recipe, checkpoint: str) -> bool:
    from specrt_export.checkpoint.hub_cache import is_hub_name

    places = plan.folder / checkpoint, Path(checkpoint).expanduser()
    return not is_hub_name(checkpoint) or any(place.exists() for place in places)
