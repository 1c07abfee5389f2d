"""One model of a build: its checkpoint and graph, what it drafts with, and what compiles it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.bundle import HEADS
from specrt.doctor import check_exporter
from specrt.engine.backends import require_runs
from specrt.errors import BuildError, CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.gguf.reader import SUFFIX
from specrt_export.checkpoint.hub_cache import cached_snapshot
from specrt_export.checkpoint.scored_entries import SIZE, model_entries
from specrt_export.checkpoint.task import TEXT_GENERATION, ModelTask, task_of
from specrt_export.compile.compiler import Compiler, open_compiler
from specrt_export.heads.head_checkpoint import HeadCheckpoint
from specrt_export.heads.head_formats import HEAD_FORMATS, head_format, is_head
from specrt_export.portable.graph import TASK, facts_of, parts_beside
from specrt_export.recipe.model_options import ModelOptions


@dataclass(frozen=True)
class ModelPlan:
    """What is built of one model; what costs time is found out when it is first read."""

    options: ModelOptions
    checkpoint: Checkpoint
    graph: Path | None
    """None where the recipe names no graph: it is exported as part of the build."""
    hub: str = ""
    """The name that the checkpoint was fetched by; empty where it was there."""
    head: HeadCheckpoint | None = None
    """The head that drafts, with both models of its pair; None where a model drafts, or nothing."""
    kind: str = ""
    """The format of a head; empty for a language model."""
    entries: NDArray[np.int64] | None = None
    """Of a draft: the target's id of each entry that it scores, rising; None where it scores all.
    """

    @property
    def role(self) -> str:
        """`target` or `draft`."""
        return self.options.role

    @cached_property
    def task(self) -> ModelTask:
        """What it is for, as its graph says, or its configuration where it has none yet."""
        if self.head is not None:
            return ModelTask(TEXT_GENERATION)
        if self.graph is None:
            return task_of(self.checkpoint.config) or ModelTask(TEXT_GENERATION)
        facts = facts_of(onnx.load(self.graph, load_external_data=False))
        encodes = "encoder" in parts_beside(self.graph)
        return ModelTask(facts.get(TASK, TEXT_GENERATION), encodes)

    @cached_property
    def compiler(self) -> Compiler:
        """What compiles it.

        Raises: EngineError where a library is missing.
        """
        return open_compiler(self.options)


def find_checkpoint(options: ModelOptions) -> tuple[Checkpoint, str]:
    """Open the checkpoint of a model; return the hub's name of one that was fetched, too.

    Raises: CheckpointError naming recipe and key.
    """
    source, key = options.source, f"{options.recipe}: {options.role}.checkpoint"
    local = options.local
    name = local if local.is_dir() or local.suffix == SUFFIX else source.checkpoint
    is_here = Path(name).expanduser().exists()
    if not (is_here or source.graph or cached_snapshot(source.checkpoint, source.revision)):
        check_exporter()  # before anything is fetched
    try:
        checkpoint = Checkpoint.open(name, source.revision or None, weight_only=source.weight_only)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from error
    if options.role == "target" and SIZE in checkpoint.config and not is_head(checkpoint):
        raise CheckpointError(
            f"{key}: {checkpoint.origin} scores {checkpoint.config[SIZE]} entries only; it is a "
            "draft, name it in [draft]"
        )
    return checkpoint, "" if is_here else source.checkpoint


def find_graph(options: ModelOptions, checkpoint: str) -> Path | None:
    """Return the graph that a recipe names for a model; None where it names none.

    Raises: BuildError for one that is missing.
    """
    if not options.source.graph:
        return None
    graph = options.recipe.parent / options.source.graph
    if not graph.is_file():
        raise BuildError(
            f"{graph} does not exist; make it with `specrt export {checkpoint} --out {graph}`, or "
            f"remove `{options.role}.graph` from {options.recipe} to export it as part of the build"
        )
    return graph


def find_head(
    options: Mapping[str, ModelOptions], checkpoints: Mapping[str, Checkpoint]
) -> HeadCheckpoint | None:
    """Return the head that drafts; None where a model drafts, or nothing.

    Raises: BuildError, CheckpointError for one that does not fit.
    """
    if "draft" not in options:
        return None
    draft, target, checkpoint = options["draft"], options["target"], checkpoints["draft"]
    layers, recipe = draft.source.layers, draft.recipe
    kind = draft.source.kind or head_format(checkpoint)
    if kind is None:
        if layers:
            raise BuildError(
                f"{recipe}: draft.layers is {list(layers)}, and {checkpoint.origin} is not a head, "
                "but a model; remove it"
            )
        return None
    _check_head(kind, target, draft)
    head = HEAD_FORMATS[kind].read(checkpoint, checkpoints["target"], layers)
    if draft.engine.max_length < head.config.least_length:
        raise BuildError(
            f"{recipe}: engine.max_length is {draft.engine.max_length}, and the head in [draft] "
            f"drafts nothing in so few; expected {head.config.least_length} or more"
        )
    return head


def find_entries(options: ModelOptions, checkpoint: Checkpoint) -> NDArray[np.int64] | None:
    """Return the entries that a draft model scores; None where it scores all.

    Raises: BuildError where its backend runs no such draft.
    """
    entries = model_entries(checkpoint)
    if entries is not None:
        name = f"{options.recipe}: {checkpoint.origin}"
        require_runs(options.backend, "trimmed", name, BuildError)
    return entries


def _check_head(kind: str, *pair: ModelOptions) -> None:
    """Refuse what no pair with a head can have.

    Raises: BuildError.
    """
    target, draft = pair
    for model in pair:
        name = f"{model.recipe}: the draft ({kind})"
        require_runs(model.backend, HEADS[kind], name, BuildError)
        role, bits = model.role, model.source.bits
        for wrong, problem in (
            (
                model.source.graph != "",
                f"{role}.graph is set, and a graph for a head is made with it: remove it",
            ),
            (
                target.backend != draft.backend,
                f"its backend is {draft.backend} and the target's {target.backend}, and it reads "
                "what the target leaves in memory: name one for both",
            ),
            (
                role == "draft" and bits != "",
                f"{role}.bits is {bits!r}, and a head's are not chosen: set `precision`",
            ),
        ):
            if wrong:
                raise BuildError(f"{model.recipe}: the draft is a head; {problem}")
