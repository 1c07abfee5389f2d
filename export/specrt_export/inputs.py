"""What a recipe names, found on this machine: checkpoints, graphs, and the hash of it all."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specrt.errors import BuildError, CheckpointError
from specrt_export.checkpoint import Checkpoint
from specrt_export.recipe import ModelSource, Recipe
from specrt_export.vocabulary import check_vocabulary

_FP32_GROWTH = {"F32": 1, "F16": 2, "BF16": 2}
MIB = 1 << 20


@dataclass(frozen=True)
class ModelInputs:
    """One model of the pair."""

    role: str
    checkpoint: Checkpoint
    graph: Path | None
    """None where the recipe names no graph: it is exported as part of the build."""


def find_inputs(recipe: Recipe) -> list[ModelInputs]:
    """Find checkpoints and graphs of a recipe, the target first.

    Raises: CheckpointError, BuildError when something named is not there.
    """
    sources = {"target": recipe.target, "draft": recipe.draft}
    return [_find(recipe, role, source) for role, source in sources.items() if source]


def _find(recipe: Recipe, role: str, source: ModelSource) -> ModelInputs:
    local = recipe.folder / source.checkpoint
    name = local if local.is_dir() else source.checkpoint
    checkpoint = Checkpoint.open(name, source.revision or None)
    graph = recipe.folder / source.graph if source.graph else None
    if graph is not None and not graph.is_file():
        raise BuildError(
            f"{graph} does not exist; make it with `specrt export {name} --out {graph}`, or "
            f"remove `{role}.graph` from {recipe.path} to export it as part of the build"
        )
    return ModelInputs(role, checkpoint, graph)


def check_inputs(inputs: list[ModelInputs], out: Path) -> None:
    """Refuse, before any work, a pair that does not fit together or a disk too small for it.

    Raises: CheckpointError, BuildError.
    """
    target = inputs[0].checkpoint
    if not (target.folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{target.folder} has no tokenizer.json; save the fast tokenizer there with "
            "transformers' `save_pretrained`"
        )
    for model in inputs[1:]:
        check_vocabulary(target, model.checkpoint)
    weights = [w for m in inputs for w in m.checkpoint.weights.values()]
    needed = sum(w.bytes * _FP32_GROWTH.get(w.dtype, 1) for w in weights) * 5 // 4 + 16 * MIB
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise BuildError(
            f"{out.parent} has {free // MIB} MiB free, and the build needs about "
            f"{needed // MIB} MiB; free some, or build elsewhere with --out"
        )


def fingerprint(recipe: Recipe, inputs: list[ModelInputs]) -> str:
    """Hash what decides the bytes of a bundle.

    Recipe and graphs count by content, weights by size and time, so that asking is free.
    """
    digest = hashlib.sha256(repr(replace(recipe, path=Path())).encode())
    digest.update(json.dumps(versions()).encode())
    for model in inputs:
        if model.graph is not None:
            digest.update(model.graph.read_bytes())
        for path in sorted(model.checkpoint.folder.iterdir()):
            if path.suffix in (".json", ".safetensors", ".jinja"):
                facts = path.stat()
                digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of what writes a bundle."""
    return {name: version(name) for name in ("specrt", "onnxruntime", "onnx")}


def end_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the tokens that end a text: none, one or several."""
    found = setting(checkpoint, "eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def setting(checkpoint: Checkpoint, key: str) -> Any:
    """Return a setting of generation_config.json, or of config.json where that has none."""
    path = checkpoint.folder / "generation_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}; fetch it again") from error
    value = settings.get(key)
    return checkpoint.config.get(key) if value is None else value
