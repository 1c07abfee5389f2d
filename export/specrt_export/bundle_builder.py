"""Builds a bundle from a recipe: every stage in order, written aside, then put in place."""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrt.bundle import FILE_NAME, FORMAT, Bundle, Manifest, ModelRecord, hash_file
from specrt.errors import BuildError, CheckpointError, SpecrtError
from specrt.params import AUTO
from specrt.text import Tokenizer
from specrt_export.check.quality import QualityGate
from specrt_export.checkpoint import Checkpoint
from specrt_export.inputs import (
    ModelInputs,
    begin_token,
    calibration_path,
    check_inputs,
    end_tokens,
    find_inputs,
    fingerprint,
    read_calibration,
    versions,
)
from specrt_export.model_builder import ModelBuilder, Progress
from specrt_export.recipe import Recipe

_AT_FDCWD, _EXCHANGE = -100, 2

_LEFT = re.compile(r"([0-9]{1,9})\.\w+\.(part|old)")
"""What follows the name of a bundle in that of a folder it is built in: process, chance, state."""


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Give a folder to build in; put it in the place of `out` at the end.

    Whatever stops the build, what was at `out` is as it was and the folder is gone. Leftovers of
    builds that were killed are removed by the next one.
    Raises: BuildError for what the disk refused.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        prefix = f".{out.name}.{os.getpid()}."
        folder = Path(tempfile.mkdtemp(".part", prefix, out.parent))
        folder.chmod(0o755)
    except OSError as error:
        raise _refused(error, out) from error
    try:
        yield folder
        _put_in_place(folder, out)
    except OSError as error:
        raise _refused(error, out) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refused(error: OSError, out: Path) -> BuildError:
    place = error.filename2 or error.filename or out
    return BuildError(f"the build stopped: {error.strerror or error} ({place}); {out} is as it was")


def _put_in_place(folder: Path, out: Path) -> None:
    """Rename a folder to `out`; a folder that is there changes places with it in one step."""
    if not out.exists():
        folder.rename(out)
    elif not _exchange(folder, out):
        old = folder.with_suffix(".old")
        out.rename(old)
        try:
            folder.rename(out)
        except BaseException:
            old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Let two names change places atomically; return False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (os.fsencode(first), os.fsencode(second))
    return rename is not None and (rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0)


def _sweep(out: Path) -> None:
    """Remove what a killed build left, and bring back a bundle it had moved away."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*"):
        # All of the rest: what `m.2` left begins with `.m.` too.
        found = _LEFT.fullmatch(left.name.removeprefix(f".{out.name}."))
        if found is None or _alive(int(found[1])):
            continue
        if left.suffix == ".old" and not out.exists():
            left.rename(out)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
    with atomic_folder(out) as folder:
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


def _gate(recipe: Recipe, target: Checkpoint) -> QualityGate | None:
    """Read the calibration text before any work, where there is one and something to measure.

    Raises: BuildError.
    """
    if not recipe.quality.calibration or not any(p.rewrites for p in recipe.precisions.values()):
        return None
    tokenizer = Tokenizer(target.folder / "tokenizer.json", begin_token(target))
    pieces = read_calibration(calibration_path(recipe), tokenizer, recipe.engine.max_length)
    return QualityGate(recipe.engine, recipe.quality, pieces)


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
