"""Builds recipes as `specrt build` does; what was exported once is not exported again."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from portable.zoo import cache_folder
from shared import locked
from specrt_export import builder
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.compile.compiler import Progress
from specrt_export.heads.head_checkpoint import HeadCheckpoint
from specrt_export.plan.build_plan import resolve
from specrt_export.portable.attachment import ExportedGraph
from specrt_export.recipe.recipe import Recipe


def build(recipe: Recipe, out: Path, progress: Progress = lambda stage, done: None) -> None:
    """Build a recipe; of the models that it exports only those that no test has exported."""
    plan = resolve(recipe, out)
    with pytest.MonkeyPatch.context() as patched:
        if any(model.graph is None for model in plan.models):
            exporter = import_module("specrt_export.portable.exporter")
            for name in ("export_graph", "export_head"):
                patched.setattr(exporter, name, once(getattr(exporter, name)))
        builder.build(plan, progress)


def is_fresh(recipe: Recipe, out: Path) -> bool:
    return resolve(recipe, out).is_fresh()


def once(export: Callable[..., ExportedGraph]) -> Callable[..., ExportedGraph]:
    """Return an export that takes the graph of an equal checkpoint, made by the same code."""

    def exported(*given: Any, **named: Any) -> ExportedGraph:
        (out,) = (one for one in given if isinstance(one, Path))
        folder = cache_folder() / f"export-{_key(export.__name__, *given, *named.values())}"
        with locked(folder.with_suffix(".lock")):
            if not folder.exists():
                made = export(*given, **named)
                part = folder.with_suffix(".part")
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                for one in (made, *made.parts):
                    shutil.copyfile(one.path, part / one.path.name)
                (part / "facts").write_bytes(pickle.dumps(made))
                part.rename(folder)
        made = pickle.loads((folder / "facts").read_bytes())
        for one in (made, *made.parts):
            shutil.copyfile(folder / one.path.name, out.parent / one.path.name)
        parts = tuple(replace(one, path=out.parent / one.path.name) for one in made.parts)
        return replace(made, path=out, parts=parts)

    return exported


def _key(*given: Any) -> str:
    """Hash what a graph and its places of weights depend on, whatever folder they are in."""
    found = hashlib.sha256()
    for one in given:
        if isinstance(one, HeadCheckpoint):
            found.update(repr((one.KIND, one.config, one.entries)).encode())
        elif isinstance(one, Checkpoint):
            weights = one.weights.values()
            places = {n: (w.file.name, w.dtype, w.shape, w.offset) for n, w in one.weights.items()}
            found.update(repr((one.config, sorted(places.items()))).encode())
            for file in dict.fromkeys(weight.file for weight in weights):
                found.update(file.read_bytes())
        else:
            found.update((one.name if isinstance(one, Path) else repr(one)).encode())
    return found.hexdigest()[:16]
