"""A build, worked out of a recipe once: every step reads its facts here."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import specrt
from specrt.bundle import TOKENIZER, Bundle
from specrt.errors import SpecrtError
from specrt.held_file import read_file
from specrt.text.tokenizer import Tokenizer
from specrt_export.checkpoint.task import SPEECH, UNBOUNDED
from specrt_export.plan.calibration_text import (
    CalibrationPieces,
    read_calibration,
    read_source_pairs,
)
from specrt_export.plan.generation_settings import begin_token, decoder_start, end_tokens
from specrt_export.plan.model_plan import (
    ModelPlan,
    find_checkpoint,
    find_entries,
    find_graph,
    find_head,
)
from specrt_export.plan.speech_pairs import feature_extractor, read_speech_pairs
from specrt_export.recipe.recipe import Recipe, settle, with_own_head
from specrt_export.recipe.recipe_tables import EngineOptions, QualityOptions


@dataclass(frozen=True)
class BuildPlan:
    """What a build makes, of what, and where; what costs time is found out when first read."""

    name: str
    recipe: Path
    """The file, which messages name."""
    out: Path
    """Where the bundle goes."""
    models: tuple[ModelPlan, ...]
    """The target first."""
    engine: EngineOptions
    quality: QualityOptions
    calibration: Path | None
    """The text to measure on."""
    settings: str
    """All that the recipe says, for the fingerprint."""
    begin: int | None
    """The token that an empty prompt begins with."""
    ends: tuple[int, ...]
    """The tokens that end a text."""

    @property
    def target(self) -> ModelPlan:
        """The model whose text is written."""
        return self.models[0]

    @property
    def draft(self) -> ModelPlan | None:
        """The model or head that drafts for it."""
        return self.models[1] if len(self.models) > 1 else None

    @cached_property
    def start(self) -> tuple[int, ...]:
        """The tokens that a text of a source begins with; none without sources."""
        return decoder_start(self.target.checkpoint, self.target.task.name)

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of what writes the bundle.

        Raises: EngineError where a library is missing.
        """
        libraries = {"onnxruntime": "unknown"}
        for model in self.models:
            libraries |= model.compiler.versions()
        return {"specrt": specrt.__version__, **libraries, "onnx": version("onnx")}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what decides the bytes of the bundle.

        Recipe and graphs count by content, weights by size and time, so that asking is free.
        """
        digest = hashlib.sha256(self.settings.encode())
        digest.update(json.dumps(self.versions).encode())
        if self.calibration is not None:
            with suppress(OSError):  # a build says what is wrong with it
                digest.update(read_file(self.calibration))
        for model in self.models:
            if model.graph is not None:
                digest.update(read_file(model.graph))
            for path in model.checkpoint.files:
                facts = path.stat()
                digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
        return digest.hexdigest()

    def is_fresh(self) -> bool:
        """Tell whether a bundle is there that opens, built from exactly this."""
        try:
            return Bundle.open(self.out).manifest.source == self.fingerprint
        except SpecrtError:
            return False

    @cached_property
    def pieces(self) -> CalibrationPieces | None:
        """The calibration text, where there is one and something to measure.

        Raises: BuildError.
        """
        precisions = [model.options.precision for model in self.models]
        if self.calibration is None or not any(p.rewrites for p in precisions):
            return None
        target, path, length = self.target.checkpoint, self.calibration, self.engine.max_length
        tokenizer = Tokenizer(target.folder / TOKENIZER, self.begin)
        fits = any(p.calibrated for p in precisions)
        if self.target.task.name == SPEECH:
            config, extractor = target.config, feature_extractor(target)
            shape = config.get("num_mel_bins", 0), 2 * config.get("max_source_positions", 0)
            return read_speech_pairs(
                path, tokenizer, self.start, length, shape, extractor, fits=fits
            )
        if self.target.task.conditioned:
            trained = target.config.get("max_position_embeddings")
            trained = trained if isinstance(trained, int) else UNBOUNDED
            most = self.engine.source_positions(trained, features=False)
            return read_source_pairs(path, tokenizer, self.start, length, most, fits=fits)
        return read_calibration(path, tokenizer, length, fits=fits)


def resolve(recipe: Recipe, out: Path) -> BuildPlan:
    """Find what a recipe names, and work out what building it into `out` takes.

    Raises: CheckpointError, BuildError, RecipeError naming recipe and key.
    """
    found = {role: find_checkpoint(options) for role, options in recipe.models.items()}
    recipe = with_own_head(recipe, found["target"][0])
    found |= dict.fromkeys(recipe.sources.keys() - found.keys(), found["target"])
    checkpoints = {role: checkpoint for role, (checkpoint, _) in found.items()}
    there = {role: checkpoint.source for role, checkpoint in checkpoints.items()}
    recipe = settle(recipe, {role: one for role, one in there.items() if one is not None})
    models = recipe.models
    head = find_head(models, checkpoints)
    if head is not None:
        found["draft"] = head.checkpoint, found["draft"][1]
    plans = []
    for role, (checkpoint, hub) in found.items():
        options, kind, entries = models[role], "", None
        graph = find_graph(options, hub or str(checkpoint.origin))
        if role == "draft" and head is not None:
            # A head alone reads no text: its codes are searched.
            searched = replace(options.source, quantizer="search")
            options, kind, entries = replace(options, source=searched), head.KIND, head.entries
        elif role == "draft":
            entries = find_entries(options, checkpoint)
        plans.append(ModelPlan(options, checkpoint, graph, hub, head, kind, entries))
    calibration = recipe.quality.calibration
    return BuildPlan(
        name=recipe.name,
        recipe=recipe.path,
        out=out,
        models=tuple(plans),
        engine=recipe.engine,
        quality=recipe.quality,
        calibration=recipe.folder / calibration if calibration else None,
        settings=repr(replace(recipe, path=Path())),
        begin=begin_token(checkpoints["target"]),
        ends=end_tokens(checkpoints["target"]),
    )
