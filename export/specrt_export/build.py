"""Build a bundle from a recipe: every stage in order, written aside, then put in place."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from specrt.bundle import Bundle, hash_file
from specrt.errors import BuildError, CheckpointError, SpecrtError
from specrt.manifest import FILE_NAME, FORMAT, Manifest, ModelRecord
from specrt.models import AUTO
from specrt.text import Tokenizer
from specrt_export.aside import aside
from specrt_export.calibration import read_calibration
from specrt_export.checkpoint import Checkpoint
from specrt_export.gate import Gate
from specrt_export.inputs import (
    ModelInputs,
    begin_token,
    calibration_path,
    check_inputs,
    end_tokens,
    find_inputs,
    fingerprint,
    versions,
)
from specrt_export.model import ModelBuilder, Progress
from specrt_export.recipe import Recipe

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


def build(recipe: Recipe, out: Path, progress: Progress = lambda stage, done: None) -> None:
    """Build the bundle of a recipe into `out`; a bundle that is there stays until it is done.

    Raises: SpecrtError; whatever stops the build, nothing half-made is left.
    """
    progress("read checkpoints", 0.0)
    inputs = find_inputs(recipe)
    _check_place(out, recipe, inputs)
    source = fingerprint(recipe, inputs)
    check_inputs(recipe, inputs, out)
    gate = _gate(recipe, inputs[0].checkpoint)
    with aside(out) as folder:
        builder = ModelBuilder(recipe, folder, gate, out)
        builder.check()
        models: dict[str, ModelRecord] = {}
        for number, model in enumerate(inputs):
            part = _part(progress, number, len(inputs))
            models[model.role] = builder.build(model, part)
        progress("write manifest", 0.95)
        _copy_tokenizer(inputs[0].checkpoint.folder, folder)
        manifest = _manifest(recipe, models, inputs[0].checkpoint, source, folder)
        (folder / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")


def is_fresh(recipe: Recipe, out: Path) -> bool:
    """Tell whether `out` holds a bundle that opens, built from exactly these inputs."""
    try:
        manifest = Bundle.open(out).manifest
        return manifest.source == fingerprint(recipe, find_inputs(recipe))
    except SpecrtError:
        return False


def _check_place(out: Path, recipe: Recipe, inputs: list[ModelInputs]) -> None:
    """Refuse to replace anything but a bundle or an empty folder, and never what is built from.

    Raises: BuildError.
    """
    there = out.is_symlink() or out.exists()
    replaceable = out.is_dir() and ((out / FILE_NAME).is_file() or not any(out.iterdir()))
    if there and (out.is_symlink() or not replaceable):
        raise BuildError(
            f"{out} exists and is not a bundle; name another place with --out, or remove it"
        )
    read = [recipe.path, *(model.checkpoint.folder for model in inputs)]
    read += [model.graph for model in inputs if model.graph is not None]
    if recipe.quality.calibration:
        read.append(calibration_path(recipe))
    for source in read:
        if source.resolve().is_relative_to(out.resolve()):
            raise BuildError(f"{out} holds {source}, which the build reads; name another --out")


def _gate(recipe: Recipe, target: Checkpoint) -> Gate | None:
    """Read the calibration text before any work, where there is one and something to measure.

    Raises: BuildError.
    """
    if not recipe.quality.calibration or not any(p.rewrites for p in recipe.precisions.values()):
        return None
    tokenizer = Tokenizer(target.folder / "tokenizer.json", begin_token(target))
    pieces = read_calibration(calibration_path(recipe), tokenizer, recipe.engine.max_length)
    return Gate(recipe.engine, recipe.quality, pieces)


def _part(progress: Progress, number: int, parts: int) -> Progress:
    """Give one model's share of the bar; the manifest is the last twentieth."""
    return lambda stage, done: progress(stage, 0.95 * (number + done) / parts)


def _copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


def _manifest(
    recipe: Recipe,
    models: dict[str, ModelRecord],
    checkpoint: Checkpoint,
    source: str,
    folder: Path,
) -> Manifest:
    """Describe what is in the folder.

    Raises: CheckpointError when the tokenizer knows tokens the model does not score.
    """
    options = recipe.engine
    known = Tokenizer(folder / "tokenizer.json").size
    scored = models["target"].geometry.vocab_size
    if known > scored:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.folder} has token ids up to {known - 1}, and the model "
            f"scores {scored}; they do not belong together"
        )
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return Manifest(
        format=FORMAT,
        name=recipe.name,
        backend=options.backend,
        precision=models["target"].precision,
        batch=options.batch,
        max_length=options.max_length,
        prefill=options.prefill,
        gammas=tuple(sorted({0, *options.gammas})),
        gamma=None if options.gamma == AUTO else options.gamma,
        eos_token_ids=end_tokens(checkpoint),
        bos_token_id=begin_token(checkpoint),
        target=models["target"],
        draft=models.get("draft"),
        versions=versions(recipe),
        device={"machine": platform.machine(), "system": platform.system()},
        source=source,
        files={p.relative_to(folder).as_posix(): hash_file(p) for p in files},
    )
