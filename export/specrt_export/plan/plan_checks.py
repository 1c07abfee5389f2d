"""What a build refuses before any work: a place, models that do not fit together, a small disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path

from specrt.bundle import FILE_NAME, GENERATION_CONFIG, TASKS, TOKENIZER
from specrt.errors import BuildError, BundleError, CheckpointError
from specrt.generation_config import read_generation_config
from specrt.system.memory import size
from specrt.text.control_tokens import token_name, tokenizer_config
from specrt.text.tokenizer import Tokenizer
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.provenance import oddity, parameters
from specrt_export.estimate.estimate import shape_of
from specrt_export.plan.build_plan import BuildPlan
from specrt_export.plan.generation_settings import generation_config
from specrt_export.plan.model_plan import ModelPlan
from specrt_export.plan.pair_vocabulary import check_vocabulary, open_tokenizer, read_tokens
from specrt_export.plan.text_files import chat_templates
from specrt_export.portable.attachment import check_weights, is_attached
from specrt_export.portable.graph import check_length, check_name
from specrt_export.precision import BITS


def check_plan(plan: BuildPlan) -> None:
    """Refuse, before any work, what would be refused after it.

    Raises: CheckpointError, BuildError, ExportError.
    """
    _check_place(plan)
    target = plan.target.checkpoint
    if plan.target.task.conditioned:  # whose sizes of vocabularies may be two
        open_tokenizer(target)
    else:
        read_tokens(target)
    chat_templates(target)
    if plan.draft is not None and plan.draft.head is None:
        check_vocabulary(target, plan.draft.checkpoint)
    for model in plan.models:
        if model.graph is not None and is_attached(model.graph):
            check_graph(model.graph, model.checkpoint, plan.engine.max_length)
        with suppress(CheckpointError):  # of a type whose sizes are not known the build tells
            shape = shape_of(model.checkpoint.config, model.checkpoint.folder, model.kind)
            model.options.check_layers(shape.geometry, mixes=shape.mixes)
    _check_tasks(plan)
    _check_disk(plan)
    _check_settings(plan)
    for model in plan.models:
        measured = plan.pieces is not None and model.options.precision.rewrites
        model.compiler.check(measured=measured)


def warnings(plan: BuildPlan) -> Iterator[str]:
    """Yield what is lawful and strange: a mixture of formats, a draft larger than its target."""
    if plan.target.head is not None and plan.target.head.guess:
        yield plan.target.head.guess
    for model in plan.models:
        odd = oddity(model.checkpoint)
        if odd is not None:
            yield f"{model.role} {model.checkpoint.origin.name} is a mixture: {odd}"
    end = _unheeded_end(plan)
    if end is not None:
        yield (
            f"the tokenizer's end token {end!r} ends no text, as in transformers: "
            "generation_config.json and config.json do not name it; add its id to the first as "
            "eos_token_id"
        )
    sizes = [parameters(model.checkpoint) for model in plan.models]
    if sizes[-1] > sizes[0]:
        yield (
            f"the draft has {sizes[-1] / 1e6:.1f} M parameters and the target "
            f"{sizes[0] / 1e6:.1f} M: drafting takes longer than it saves; change their places"
        )


def _unheeded_end(plan: BuildPlan) -> str | None:
    """Return the end token that only the tokenizer's configuration names, if there is one."""
    folder = plan.target.checkpoint.folder
    name = token_name(tokenizer_config(folder).get("eos_token"))
    if not name:
        return None
    ids = Tokenizer(folder / TOKENIZER).encode(name)
    return name if len(ids) == 1 and ids[0] not in plan.ends else None


def check_graph(graph: Path, checkpoint: Checkpoint, max_length: int) -> None:
    """Hold a portable graph to its checkpoint, and to the positions asked for.

    Raises: BuildError, CheckpointError, ExportError.
    """
    check_length(check_weights(graph, checkpoint), max_length, checkpoint.folder)


def _check_place(plan: BuildPlan) -> None:
    """Refuse to replace anything but a bundle or an empty folder, and never what is built from.

    Raises: BuildError.
    """
    out = plan.out
    check_name(out)
    there = out.is_symlink() or out.exists()
    replaceable = out.is_dir() and ((out / FILE_NAME).is_file() or not any(out.iterdir()))
    if there and (out.is_symlink() or not replaceable):
        raise BuildError(
            f"{out} exists and is not a bundle; name another place with --out, or remove it"
        )
    read = [*filter(Path.is_file, [plan.recipe]), *(m.checkpoint.origin for m in plan.models)]
    read += [model.graph for model in plan.models if model.graph is not None]
    if plan.calibration is not None:
        read.append(plan.calibration)
    for source in read:
        if source.resolve().is_relative_to(out.resolve()):
            raise BuildError(f"{out} holds {source}, which the build reads; name another --out")


def _check_tasks(plan: BuildPlan) -> None:
    """Refuse what no encoder-decoder, or no pair with one, can have.

    Raises: BuildError.
    """
    target = plan.target.task
    if target.conditioned and not target.encodes:
        raise BuildError(
            f"{plan.recipe}: {plan.target.checkpoint.origin} has no encoder; name a whole model as "
            "the target, and this in [draft]"
        )
    for model in plan.models:
        if model.task.name != target.name:
            raise BuildError(
                f"{plan.recipe}: the target is for {target.name}, and the draft for "
                f"{model.task.name}; choose a draft of the same kind"
            )
    for model in plan.models:
        model.options.require_kind(TASKS[target.name], model.checkpoint.origin, BuildError)


def _check_settings(plan: BuildPlan) -> None:
    """Refuse settings of an encoder-decoder that no bundle of it would open with.

    Raises: CheckpointError.
    """
    checkpoint = plan.target.checkpoint
    scored = checkpoint.config.get("decoder_vocab_size") or checkpoint.config.get("vocab_size")
    if not plan.target.task.conditioned or type(scored) is not int:
        return
    try:
        read_generation_config(
            checkpoint.folder / GENERATION_CONFIG,
            json.dumps(generation_config(checkpoint)).encode(),
            start=len(plan.start),
            vocabulary=scored,
        )
    except BundleError as error:
        raise CheckpointError(str(error)) from None


def _check_disk(plan: BuildPlan) -> None:
    """Refuse a disk that is too small.

    Raises: BuildError.
    """
    out = plan.out
    needed = sum(map(_disk_bytes, plan.models)) * 5 // 4 + (16 << 20)
    free = _free(out.parent)
    if free < needed:
        raise BuildError(
            f"{out.parent} has {size(free)} free, and the build needs about {size(needed)}; free "
            "some, or build elsewhere with --out"
        )


def _disk_bytes(model: ModelPlan) -> int:
    """Return about what building one model takes."""
    ends, precision = model.checkpoint.config.get("vocab_size"), model.options.precision
    coded = model.checkpoint.coded
    total = sum(
        prod(weight.shape) * precision.disk_bytes(end=weight.shape[:1] == (ends,))
        for name, weight in model.checkpoint.weights.items()
        if name not in coded
    )
    # Codes, fp32 scales and minimums, in the kept graph's folder and in the engine.
    total += sum(
        2 * prod(weight.shape) * (BITS[weight.precision] / 8 + 8 / weight.block)
        for weight in coded.values()
    )
    return int(total * model.options.spec.disk_factor)


def _free(folder: Path) -> int:
    """Make a folder where it is missing, and return the bytes that fit in."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise BuildError(
            f"{folder} cannot be made a folder ({reason}); build elsewhere with --out"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BuildError(f"{folder} may not be written to; build elsewhere with --out")
    return free
