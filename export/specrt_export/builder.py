"""Builds a bundle from a recipe: each model in turn, in a folder that then takes its place."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path

import specrt
from specrt.bundle import (
    CHAT_TEMPLATE,
    FILE_NAME,
    GENERATION_CONFIG,
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    TASKS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Bundle,
    EncoderRecord,
    Manifest,
    ModelRecord,
    Provenance,
    format_of,
    hash_file,
)
from specrt.doctor import check_exporter
from specrt.engine.backends import backend_named
from specrt.engine.protocol import Source
from specrt.errors import BuildError, BundleError, CheckpointError, SpecrtError, one_line
from specrt.generation_config import read_generation_config
from specrt.held_file import read_file
from specrt.params import AUTO
from specrt.system.memory import available_bytes
from specrt.text.control_tokens import (
    SPECIAL_TOKENS_MAP,
    token_name,
    tokenizer_config,
)
from specrt.text.tokenizer import Tokenizer
from specrt_export.atomic_folder import atomic_folder
from specrt_export.check.drafting import acceptance_by_position
from specrt_export.check.equivalence import Reference, check_parity
from specrt_export.check.measured_model import MeasuredModel, ModelTrials
from specrt_export.check.quality import Likeliest, QualityGate, acceptance
from specrt_export.checkpoint.checkpoint import Checkpoint, linked
from specrt_export.checkpoint.provenance import oddity, parameters, provenance_of
from specrt_export.checkpoint.task import SPEECH
from specrt_export.compile.compiler import (
    KV_BYTES,
    CompiledModel,
    Compiler,
    GraphSource,
    Progress,
)
from specrt_export.heads.head_checkpoint import HeadCheckpoint, feature_weights, own_weights
from specrt_export.heads.head_formats import HEAD_FORMATS
from specrt_export.plan.model_inputs import (
    CalibrationPieces,
    ModelInputs,
    begin_token,
    bundled_tokenizer,
    calibration_path,
    chat_templates,
    check_graph,
    check_inputs,
    decoder_start,
    end_tokens,
    find_inputs,
    generation_config,
    model_task,
    most_source,
    quantized_sources,
    read_calibration,
    read_source_pairs,
    shares_encoder,
)
from specrt_export.plan.speech_pairs import feature_extractor, read_speech_pairs
from specrt_export.portable.attachment import attach_graph, is_attached
from specrt_export.portable.external_data import external_tensors
from specrt_export.portable.graph import (
    TASK,
    SourceRun,
    Tokens,
    check_name,
    facts_of,
    part_path,
    read_graph,
    runs_here,
)
from specrt_export.quantize.calibration import CalibrationText
from specrt_export.quantize.quantizer import keep
from specrt_export.recipe.recipe import Recipe, settle

VOCAB_MAP = "draft/vocab_map.bin"

COPIED_FILES = (
    TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE, PREPROCESSOR_CONFIG, PROCESSOR_CONFIG,
)  # fmt: skip


def build(recipe: Recipe, out: Path, progress: Progress = lambda stage, done: None) -> None:
    """Build the bundle of a recipe into `out`; a bundle that is there stays until it is done.

    Raises: SpecrtError; whatever stops the build, nothing half-made is left.
    """
    if not all(source.graph for source in recipe.sources.values()):
        check_exporter()
    inputs = find_inputs(recipe)
    recipe = settle(recipe, quantized_sources(inputs))
    _check_place(out, recipe, inputs)
    builder = ModelBuilder.of(recipe)
    source = fingerprint(builder, inputs)
    check_inputs(recipe, inputs, out)
    _check_settings(inputs[0])
    pieces = _calibration(recipe, inputs[0])
    if pieces is not None:
        gate = QualityGate(recipe.engine, recipe.quality, pieces.scored, pieces.sources)
        builder = replace(
            builder, gate=gate, fitted=pieces.fitted, fitted_sources=pieces.fitted_sources
        )
    builder.check()
    progress("read weights", 0.0)
    for model in inputs:
        model.checkpoint.check_numbers()
    with atomic_folder(out) as folder:
        _warn(inputs, progress)
        models: dict[str, ModelRecord] = {}
        said: dict[str, Likeliest | None] = {}
        with tempfile.TemporaryDirectory(dir=folder) as graphs:
            for number, model in enumerate(inputs):
                part = _part(progress, number, len(inputs))
                built = builder.build(model, folder, Path(graphs), out, part)
                models[model.role], said[model.role] = built.record, built.likeliest
                builder = replace(builder, target=builder.target or built)
        progress("hash checkpoints", 0.95)
        origins = {model.role: _provenance(recipe, model) for model in inputs}
        progress("write manifest", 0.97)
        _copy_tokenizer(inputs[0].checkpoint, folder)
        head = inputs[0].head
        if inputs[-1].entries is not None:
            (folder / VOCAB_MAP).write_bytes(inputs[-1].entries.astype("<i4").tobytes())
        manifest = _manifest(builder, models, inputs[0].checkpoint, source, folder)
        target, draft = said["target"], said.get("draft")
        if target is not None and draft is not None:
            manifest = replace(manifest, acceptance=acceptance(target, draft))
        manifest = replace(manifest, origins=origins)
        (folder / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")
        if head is not None and manifest.draft is not None:
            # Of the bundle as it will be run; no hash is of the manifest.
            accepted = _accepted(recipe, folder, progress)
            manifest = replace(manifest, draft=replace(manifest.draft, accepted=accepted))
            (folder / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")
    shutil.rmtree(_unfinished(out), ignore_errors=True)


def _provenance(recipe: Recipe, model: ModelInputs) -> Provenance:
    """Return where the weights of a model are from."""
    return provenance_of(model.checkpoint, model.hub, recipe.sources[model.role].revision)


def _warn(inputs: list[ModelInputs], progress: Progress) -> None:
    """Say what is lawful and strange: weights stored unlike the others, a draft that is larger."""
    guess = inputs[0].head.guess if inputs[0].head is not None else ""
    if guess:
        progress(f"warning: {guess}", 0)
    for model in inputs:
        odd = oddity(model.checkpoint)
        if odd is not None:
            progress(f"warning: {model.role} {model.checkpoint.origin.name} is a mixture: {odd}", 0)
    end = _unheeded_end(inputs[0].checkpoint)
    if end is not None:
        progress(
            f"warning: the tokenizer's end token {end!r} ends no text, as in transformers: "
            "generation_config.json and config.json do not name it; add its id to the first as "
            "eos_token_id",
            0,
        )
    sizes = [parameters(model.checkpoint) for model in inputs]
    if sizes[-1] > sizes[0]:
        progress(
            f"warning: the draft has {sizes[-1] / 1e6:.1f} M parameters and the target "
            f"{sizes[0] / 1e6:.1f} M: drafting takes longer than it saves; change their places",
            0,
        )


def _unheeded_end(checkpoint: Checkpoint) -> str | None:
    """Return the end token that only the tokenizer's configuration names, if there is one."""
    name = token_name(tokenizer_config(checkpoint.folder).get("eos_token"))
    if not name:
        return None
    ids = Tokenizer(checkpoint.folder / TOKENIZER).encode(name)
    return name if len(ids) == 1 and ids[0] not in end_tokens(checkpoint) else None


def _accepted(recipe: Recipe, bundle: Path, progress: Progress) -> tuple[float, ...]:
    """Return how many of the tokens that a head drafts are accepted, and refuse too few.

    Raises: BuildError.
    """
    least = recipe.quality.min_acceptance
    if not recipe.quality.calibration:
        progress(
            "warning: nothing tells how much of what the head drafts is accepted; name a text as "
            "`calibration` in [quality]",
            0.98,
        )
        return ()
    if missing := backend_named(recipe.backend_of("target")).missing():
        progress(
            f"warning: how much of what the head drafts is accepted is not measured ({missing}); "
            "build it for ort-cpu too, or where it will run",
            0.98,
        )
        return ()
    progress("draft", 0.98)
    shares = acceptance_by_position(bundle, calibration_path(recipe))
    if shares[0] < least:
        raise BuildError(
            f"the target accepts {shares[0]:.2f} of the first tokens that the head drafts, and "
            f"quality.min_acceptance is {least}; the head may be of another target, read other "
            "layers (`layers` in [draft]), or be trained on text with another chat template"
        )
    return tuple(shares)


def _unfinished(out: Path) -> Path:
    """Return where a killed build of a bundle leaves the codes that it found."""
    return out.with_name(f".{out.name}.calibration")


def is_fresh(recipe: Recipe, out: Path) -> bool:
    """Tell whether `out` holds a bundle that opens, built from exactly these inputs."""
    try:
        manifest = Bundle.open(out).manifest
        inputs = find_inputs(recipe)
        builder = ModelBuilder.of(settle(recipe, quantized_sources(inputs)))
        return manifest.source == fingerprint(builder, inputs)
    except SpecrtError:
        return False


def _check_place(out: Path, recipe: Recipe, inputs: list[ModelInputs]) -> None:
    """Refuse to replace anything but a bundle or an empty folder, and never what is built from.

    Raises: BuildError.
    """
    check_name(out)
    there = out.is_symlink() or out.exists()
    replaceable = out.is_dir() and ((out / FILE_NAME).is_file() or not any(out.iterdir()))
    if there and (out.is_symlink() or not replaceable):
        raise BuildError(
            f"{out} exists and is not a bundle; name another place with --out, or remove it"
        )
    read = [*filter(Path.is_file, [recipe.path]), *(model.checkpoint.origin for model in inputs)]
    read += [model.graph for model in inputs if model.graph is not None]
    if recipe.quality.calibration:
        read.append(calibration_path(recipe))
    for source in read:
        if source.resolve().is_relative_to(out.resolve()):
            raise BuildError(f"{out} holds {source}, which the build reads; name another --out")


def _check_settings(model: ModelInputs) -> None:
    """Refuse settings of an encoder-decoder that no bundle of it would open with.

    Raises: CheckpointError.
    """
    task, checkpoint = model_task(model), model.checkpoint
    size = checkpoint.config.get("decoder_vocab_size") or checkpoint.config.get("vocab_size")
    if not task.conditioned or type(size) is not int:
        return
    settings = generation_config(checkpoint)
    try:
        read_generation_config(
            checkpoint.folder / GENERATION_CONFIG,
            json.dumps(settings).encode(),
            start=len(decoder_start(checkpoint, task.name)),
            vocabulary=size,
        )
    except BundleError as error:
        raise CheckpointError(str(error)) from None


def _calibration(recipe: Recipe, model: ModelInputs) -> CalibrationPieces | None:
    """Read the calibration text before any work, where there is one and something to measure.

    Raises: BuildError.
    """
    if not recipe.quality.calibration or not any(p.rewrites for p in recipe.precisions.values()):
        return None
    target, path, length = model.checkpoint, calibration_path(recipe), recipe.engine.max_length
    tokenizer = Tokenizer(target.folder / "tokenizer.json", begin_token(target))
    task = model_task(model)
    fits = any(p.calibrated for p in recipe.precisions.values())
    if task.name == SPEECH:
        start, sizes = decoder_start(target, task.name), target.config
        shape = sizes.get("num_mel_bins", 0), 2 * sizes.get("max_source_positions", 0)
        extractor = feature_extractor(target)
        return read_speech_pairs(path, tokenizer, start, length, shape, extractor, fits=fits)
    if task.conditioned:
        start = decoder_start(target, task.name)
        most = most_source(recipe, target)
        return read_source_pairs(path, tokenizer, start, length, most, fits=fits)
    return read_calibration(path, tokenizer, length, fits=fits)


def _part(progress: Progress, number: int, parts: int) -> Progress:
    """Give one model's share of the bar; the manifest is the last twentieth."""
    return lambda stage, done: progress(stage, 0.95 * (number + done) / parts)


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the tokenizer's files; what files of older and newer kinds add is in them.

    Raises: CheckpointError for a chat template that cannot be read.
    """
    home = checkpoint.folder
    (folder / TOKENIZER).write_bytes(bundled_tokenizer(checkpoint))
    for name in COPIED_FILES:
        if (home / name).is_file():
            shutil.copyfile(home / name, folder / name)
    named = chat_templates(checkpoint) if checkpoint.named_templates else {}
    if named or (home / SPECIAL_TOKENS_MAP).is_file():
        config = tokenizer_config(home)
        if named:
            (folder / CHAT_TEMPLATE).unlink(missing_ok=True)
            if isinstance(config.get("chat_template"), str):
                named.setdefault("default", config["chat_template"])
            templates = [{"name": name, "template": text} for name, text in named.items()]
            config["chat_template"] = templates
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    settings = generation_config(checkpoint)
    if settings and not (folder / GENERATION_CONFIG).exists():
        (folder / GENERATION_CONFIG).write_text(json.dumps(settings), encoding="utf-8")


def _manifest(
    builder: ModelBuilder,
    models: dict[str, ModelRecord],
    checkpoint: Checkpoint,
    source: str,
    folder: Path,
) -> Manifest:
    """Describe what is in the folder.

    Raises: CheckpointError when the tokenizer knows tokens the model does not score.
    """
    recipe, options = builder.recipe, builder.recipe.engine
    known = Tokenizer(folder / "tokenizer.json").size
    scored = models["target"].geometry.vocab_size
    if known > scored:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.origin} has token ids up to {known - 1}, and the model "
            f"scores {scored}; they do not belong together"
        )
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    assert builder.target is not None, "a bundle has a target"
    task = builder.target.task
    return Manifest(
        format=format_of(*models.values()),
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
        versions=builder.versions(),
        device={"machine": platform.machine(), "system": platform.system()},
        source=source,
        files={p.relative_to(folder).as_posix(): hash_file(p) for p in files},
        task=task,
        decoder_start=decoder_start(checkpoint, task),
        drafter=options.drafter,
    )


def _open_reference(checkpoint: Checkpoint, parameters: int) -> tuple[Reference | None, str]:
    """Open a checkpoint with transformers; None and the reason where that cannot be."""
    needed, free = 4 * parameters, available_bytes()
    if free is not None and needed > free:
        return None, f"it takes {needed / 1e9:.1f} GB there, and {free / 1e9:.1f} GB are free"
    try:
        return Reference(checkpoint), ""
    except Exception as error:  # a release that lacks this model raises anything
        return None, f"it cannot open it: {one_line(str(error))}"


def _parameters(source: GraphSource) -> int:
    graphs = map(read_graph, (source.graph, *source.parts.values()))
    sizes = {t.name: prod(t.dims) for graph in graphs for t in external_tensors(graph)}
    return sum(sizes.values())


@dataclass(frozen=True)
class BuiltModel:
    """A model in its folder, and what the draft of it is held to."""

    record: ModelRecord
    likeliest: Likeliest | None
    original: GraphSource
    """The portable graph of its checkpoint."""
    task: str
    """One of `TASKS`."""


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the models of one recipe, each into a folder of its role."""

    recipe: Recipe
    compilers: dict[str, Compiler]
    """Of each role."""
    gate: QualityGate | None = None
    """None without a calibration text."""
    fitted: Sequence[Tokens] = ()
    """Pieces of it that codes are found on."""
    fitted_sources: Sequence[Source] = ()
    """Of an encoder-decoder: what each of these is a text of."""
    target: BuiltModel | None = None
    """Once it is built: a draft may share its encoder."""

    @classmethod
    def of(cls, recipe: Recipe, gate: QualityGate | None = None) -> ModelBuilder:
        """Return a builder with the compilers of a recipe.

        Raises: EngineError where a library is missing.
        """
        return cls(recipe, {role: open_compiler(recipe, role) for role in recipe.sources}, gate)

    def check(self) -> None:
        """Refuse, before any work, what a library would refuse after it.

        Raises: BuildError.
        """
        for role, compiler in self.compilers.items():
            measured = self.gate is not None and self.recipe.precisions[role].rewrites
            compiler.check(role, measured=measured)

    def versions(self) -> dict[str, str]:
        """Return the versions of what writes a bundle."""
        libraries = {"onnxruntime": "unknown"}
        for compiler in self.compilers.values():
            libraries |= compiler.versions()
        return {"specrt": specrt.__version__, **libraries, "onnx": version("onnx")}

    def build(
        self, model: ModelInputs, folder: Path, graphs: Path, previous: Path, progress: Progress
    ) -> BuiltModel:
        """Build an engine, compare it with its graph, and measure what quantizing did.

        `folder` is the bundle that is built, `graphs` where portable graphs are kept until it is,
        `previous` where an older one may be.
        Raises: SpecrtError.
        """
        role = model.role
        compiler = self.compilers[role]

        def compiled_part(stage: str, done: float) -> None:
            progress(f"{role}: {stage}", 0.6 + 0.4 * done)

        with tempfile.TemporaryDirectory(dir=folder) as name:
            scratch = Path(name)
            original = self._export(model, graphs, scratch, progress)
            # Of the checkpoint: a quantized graph has scales besides, and may hold a table twice.
            parameters = _parameters(original)
            if model.checkpoint.coded:
                kept = keep(original.graph, model.checkpoint, scratch / "kept")
                original = GraphSource(kept.graph, kept.folder)
            self._compare_with_model(model, original, parameters, progress)
            if self._shares(original) and "encoder" in original.parts:
                original = _without_encoder(original, graphs)
                parameters = _parameters(original)
            text = CalibrationText(self.fitted, _unfinished(previous) / role, self.fitted_sources)
            is_head = role == "draft" and model.head is not None
            gate = None if is_head else self.gate  # what it drafts is measured with its target
            if gate is not None and self.target is not None and _reads_states(original):
                target = self.target.original
                encoder = SourceRun.beside(target.graph, target.weights)
                gate = gate.encoded(encoder)
                text = replace(text, sources=encoder.states(text.sources))
            recipe = _searched(self.recipe) if is_head else self.recipe
            measured = ModelTrials(
                recipe, role, compiler, gate, text, original, scratch, progress
            ).best()
            progress(f"compile {role}", 0.6)
            lowered = measured.lowered
            compiled = compiler.compile(lowered, folder / role, previous / role, compiled_part)
            record = self._record(parameters, measured, compiled)
            vocab_map = "" if model.entries is None else VOCAB_MAP
            kind = model.head.KIND if role == "draft" and model.head is not None else ""
            record = replace(record, kind=kind, vocab_map=vocab_map)
            task = facts_of(read_graph(original.graph)).get(TASK, TASKS[0])
            return BuiltModel(record, measured.likeliest, original, task)

    def _shares(self, draft: GraphSource) -> bool:
        """Tell whether a draft has no encoder, or one that its target has, too, bit for bit.

        Raises: CheckpointError for one without that does not fit its target's.
        """
        if self.target is None or not draft.parts:
            return False
        target = self.target.original
        return shares_encoder((target.graph, target.weights), (draft.graph, draft.weights))

    def _export(
        self, model: ModelInputs, graphs: Path, scratch: Path, progress: Progress
    ) -> GraphSource:
        """Return the portable graph that the recipe names, or export one."""
        graph, checkpoint = model.graph, model.checkpoint
        if model.head is not None:
            progress(f"export {model.role}", 0.0)
            return self._export_pair(model, model.head, scratch)
        if checkpoint.gguf is not None:
            progress(f"unpack {model.role}", 0.0)
            checkpoint.unpack()
        if graph is None:
            progress(f"export {model.role}", 0.0)
            graph = _export(checkpoint, graphs / f"{model.role}.onnx")
            check_graph(graph, checkpoint, self.recipe.engine.max_length)
        elif not is_attached(graph):
            progress(f"attach {model.role}", 0.0)
            graph = attach_graph(graph, checkpoint, graphs / f"{model.role}.onnx").path
            check_graph(graph, checkpoint, self.recipe.engine.max_length)
        return GraphSource(graph, checkpoint.folder)

    def _export_pair(self, model: ModelInputs, head: HeadCheckpoint, scratch: Path) -> GraphSource:
        """Export a target with the feature that its head reads, or that head."""
        from specrt_export.portable.exporter import export_graph, export_head

        graph, weights = scratch / f"{model.role}.onnx", scratch / "weights"
        length = self.recipe.engine.max_length
        if model.role == "target":
            own = {**model.checkpoint.weights, **feature_weights(head)}
            checkpoint = linked(model.checkpoint, own, weights)
            export_graph(checkpoint, graph, head=head)
        else:
            checkpoint = linked(model.checkpoint, own_weights(head), weights)
            export_head(head, checkpoint, graph, length)
        check_graph(graph, checkpoint, length)
        return GraphSource(graph, weights)

    def _compare_with_model(
        self, model: ModelInputs, source: GraphSource, parameters: int, progress: Progress
    ) -> None:
        """Compare the portable graph with transformers, where that is installed and has room."""
        if not (runs_here() and all(map(find_spec, ("torch", "transformers")))):
            return
        if model.head is not None and model.role == "draft":
            progress("compare draft with torch", 0.1)
            check_graph_of = HEAD_FORMATS[model.head.KIND].part("check_graph")
            check_graph_of(model.head, source.graph, source.weights)
            return
        reference, reason = _open_reference(model.checkpoint, parameters)
        if reference is None:
            progress(f"warning: {model.role} is not compared with transformers: {reason}", 0.1)
            return
        progress(f"compare {model.role} with transformers", 0.1)
        check_parity(model.checkpoint, source.graph, reference=reference, folder=source.weights)
        if model.head is not None:
            from specrt_export.check.head_equivalence import check_feature

            check_feature(model.head, reference, source.graph, source.weights)

    def _record(
        self, parameters: int, measured: MeasuredModel, compiled: CompiledModel
    ) -> ModelRecord:
        lowered, bits = measured.lowered, measured.bits
        role = lowered.role
        precision = self.recipe.precisions[role]
        return ModelRecord(
            engine=f"{role}/{compiled.file}",
            geometry=lowered.geometry,
            model_type=lowered.model_type,
            parameters=parameters,
            weight_bytes=compiled.weight_bytes,
            kv_item_bytes=KV_BYTES[lowered.compute],
            fused=lowered.fused,
            precision=" and ".join(sorted(set((bits or {}).values()))) or precision.layers,
            embedding=precision.embedding,
            head=(bits or {}).get("head", precision.head),
            block=precision.block,
            per_row=precision.per_row,
            symmetric=precision.symmetric,
            quality=measured.quality,
            backend=self.recipe.backend_of(role),
            bits=bits,
            features=lowered.features,
            encoder=_placed(compiled.encoder, role),
        )


def _placed(encoder: EncoderRecord | None, role: str) -> EncoderRecord | None:
    """Return what conditions a decoder, by names in the bundle."""
    if encoder is None:
        return None
    cross, own = (f"{role}/{name}" if name else "" for name in (encoder.cross, encoder.encoder))
    return replace(encoder, cross=cross, encoder=own)


def _reads_states(source: GraphSource) -> bool:
    """Tell whether a model is a draft that reads the hidden states of its target."""
    return bool(source.parts) and "encoder" not in source.parts


def _without_encoder(source: GraphSource, graphs: Path) -> GraphSource:
    """Return the graphs of a draft that reads the hidden states of its target."""
    decoder = graphs / "sharing.onnx"
    shutil.copyfile(source.graph, decoder)
    shutil.copyfile(source.parts["cross"], part_path(decoder, "cross"))
    return GraphSource(decoder, source.weights)


def _searched(recipe: Recipe) -> Recipe:
    """Return a recipe whose draft's codes are searched: a head alone reads no text."""
    assert recipe.draft is not None, "a head is a draft"
    return replace(recipe, draft=replace(recipe.draft, quantizer="search"))


def open_compiler(recipe: Recipe, role: str) -> Compiler:
    """Return the compiler of a model's backend.

    Raises: EngineError where its library is missing.
    """
    module, _, name = recipe.spec_of(role).compiler.partition(":")
    compiler: Compiler = getattr(import_module(module), name)(recipe, recipe.backend_of(role))
    return compiler


def _export(checkpoint: Checkpoint, graph: Path) -> Path:
    from specrt_export.portable.exporter import export_graph

    return export_graph(checkpoint, graph).path


def fingerprint(builder: ModelBuilder, inputs: list[ModelInputs]) -> str:
    """Hash what decides the bytes of a bundle.

    Recipe and graphs count by content, weights by size and time, so that asking is free.
    """
    recipe = builder.recipe
    digest = hashlib.sha256(repr(replace(recipe, path=Path())).encode())
    digest.update(json.dumps(builder.versions()).encode())
    if recipe.quality.calibration:
        with suppress(OSError):  # a build says what is wrong with it
            digest.update(read_file(calibration_path(recipe)))
    for model in inputs:
        if model.graph is not None:
            digest.update(read_file(model.graph))
        for path in model.checkpoint.files:
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.hexdigest()
