"""Builds a bundle as planned: each model in turn, in a folder that then takes its place."""

from __future__ import annotations

import platform
import shutil
import tempfile
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from specrt.bundle import (
    FILE_NAME,
    FORMAT,
    TOKENIZER,
    EncoderRecord,
    Manifest,
    ModelRecord,
    Provenance,
    hash_file,
)
from specrt.doctor import check_exporter
from specrt.errors import CheckpointError
from specrt.params import AUTO
from specrt.text.tokenizer import Tokenizer
from specrt_export.atomic_folder import atomic_folder
from specrt_export.check.drafting import measured_acceptance
from specrt_export.check.measured_model import MeasuredModel, ModelTrials
from specrt_export.check.model_parity import compare_with_model
from specrt_export.check.quality import Likeliest, QualityGate, acceptance
from specrt_export.check.template_trial import check_templates
from specrt_export.checkpoint.checkpoint import linked
from specrt_export.checkpoint.provenance import provenance_of
from specrt_export.compile.compiler import KV_BYTES, CompiledModel, GraphSource, Progress
from specrt_export.heads.head_checkpoint import HeadCheckpoint, feature_weights, own_weights
from specrt_export.plan.build_plan import BuildPlan
from specrt_export.plan.model_plan import ModelPlan
from specrt_export.plan.plan_checks import check_graph, check_plan, warnings
from specrt_export.plan.text_files import write_text_files
from specrt_export.portable.attachment import attach_graph, is_attached
from specrt_export.portable.external_data import external_tensors
from specrt_export.portable.graph import SourceRun, part_path, read_graph
from specrt_export.portable.shared_encoder import shares_encoder
from specrt_export.quantize.calibration import CalibrationText
from specrt_export.quantize.quantizer import keep

VOCAB_MAP = "draft/vocab_map.bin"


def build(plan: BuildPlan, progress: Progress = lambda stage, done: None) -> None:
    """Build a bundle into its place; one that is there stays until it is done.

    Raises: SpecrtError; whatever stops the build, nothing half-made is left.
    """
    if not all(model.graph for model in plan.models):
        check_exporter()
    source = plan.fingerprint  # of what is there now: a file may change meanwhile
    check_plan(plan)
    check_templates(plan.target.checkpoint)
    progress("read weights", 0.0)
    for model in plan.models:
        model.checkpoint.check_numbers()
    with atomic_folder(plan.out) as folder:
        for warning in warnings(plan):
            progress(f"warning: {warning}", 0)
        built: dict[str, BuiltModel] = {}
        with tempfile.TemporaryDirectory(dir=folder) as graphs:
            for number, model in enumerate(plan.models):
                part = _part(progress, number, len(plan.models))
                target = built.get("target")
                work = ModelBuild(plan, model, folder, Path(graphs), part, target)
                built[model.role] = work.run()
        progress("hash checkpoints", 0.95)
        origins = {model.role: _provenance(model) for model in plan.models}
        progress("write manifest", 0.97)
        write_text_files(plan.target.checkpoint, folder)
        entries = plan.models[-1].entries
        if entries is not None:
            (folder / VOCAB_MAP).write_bytes(entries.astype("<i4").tobytes())
        manifest = replace(_manifest(plan, built, source, folder), origins=origins)
        (folder / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")
        if plan.target.head is not None and manifest.draft is not None:
            # Of the bundle as it will be run; no hash is of the manifest.
            accepted = measured_acceptance(plan, folder, progress)
            manifest = replace(manifest, draft=replace(manifest.draft, accepted=accepted))
            (folder / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")
    shutil.rmtree(_unfinished(plan.out), ignore_errors=True)


def _provenance(model: ModelPlan) -> Provenance:
    """Return where the weights of a model are from."""
    return provenance_of(model.checkpoint, model.hub, model.options.source.revision)


def _unfinished(out: Path) -> Path:
    """Return where a killed build of a bundle leaves the codes that it found."""
    return out.with_name(f".{out.name}.calibration")


def _part(progress: Progress, number: int, parts: int) -> Progress:
    """Give one model's share of the bar; the manifest is the last twentieth."""
    return lambda stage, done: progress(stage, 0.95 * (number + done) / parts)


def _manifest(
    plan: BuildPlan, models: dict[str, BuiltModel], source: str, folder: Path
) -> Manifest:
    """Describe what is in the folder.

    Raises: CheckpointError when the tokenizer knows tokens the model does not score.
    """
    options, target, draft = plan.engine, models["target"], models.get("draft")
    known = Tokenizer(folder / TOKENIZER).size
    scored = target.record.geometry.vocab_size
    if known > scored:
        raise CheckpointError(
            f"the tokenizer of {plan.target.checkpoint.origin} has token ids up to {known - 1}, "
            f"and the model scores {scored}; they do not belong together"
        )
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    manifest = Manifest(
        format=FORMAT,
        name=plan.name,
        backend=options.backend,
        precision=target.record.precision,
        batch=options.batch,
        max_length=options.max_length,
        prefill=options.prefill,
        gammas=tuple(sorted({0, *options.gammas})),
        gamma=None if options.gamma == AUTO else options.gamma,
        eos_token_ids=plan.ends,
        bos_token_id=plan.begin,
        target=target.record,
        draft=None if draft is None else draft.record,
        versions=plan.versions,
        device={"machine": platform.machine(), "system": platform.system()},
        source=source,
        files={p.relative_to(folder).as_posix(): hash_file(p) for p in files},
        task=plan.target.task.name,
        decoder_start=plan.start,
        drafter=options.drafter,
        snapshot_bytes=options.snapshot_bytes,
    )
    if draft is None or target.likeliest is None or draft.likeliest is None:
        return manifest
    return replace(manifest, acceptance=acceptance(target.likeliest, draft.likeliest))


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


@dataclass(frozen=True)
class ModelBuild:
    """Builds one model into a folder of its role: export, check, quantize, lower, compile."""

    plan: BuildPlan
    model: ModelPlan
    folder: Path
    """The bundle that is built."""
    graphs: Path
    """Where portable graphs are until it is."""
    progress: Progress
    target: BuiltModel | None = None
    """Of a draft: it may share its encoder."""

    def run(self) -> BuiltModel:
        """Build an engine, compare it with its graph, and measure what quantizing did.

        Raises: SpecrtError.
        """
        model, role, progress = self.model, self.model.role, self.progress

        def compiled_part(stage: str, done: float) -> None:
            progress(f"{role}: {stage}", 0.6 + 0.4 * done)

        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            scratch = Path(name)
            original = self._export(scratch)
            # Of the checkpoint: a quantized graph has scales besides, and may hold a table twice.
            parameters = _parameters(original)
            if model.checkpoint.coded:
                kept = keep(original.graph, model.checkpoint, scratch / "kept")
                original = GraphSource(kept.graph, kept.folder)
            compare_with_model(model, original, parameters, progress)
            if self._shares(original) and "encoder" in original.parts:
                original = _without_encoder(original, self.graphs)
                parameters = _parameters(original)
            gate, text = self._measures(original)
            measured = ModelTrials(model, gate, text, original, scratch, progress).best()
            progress(f"compile {role}", 0.6)
            compiled = model.compiler.compile(
                measured.lowered, self.folder / role, self.plan.out / role, compiled_part
            )
            record = self._record(parameters, measured, compiled)
            return BuiltModel(record, measured.likeliest, original)

    def _measures(self, original: GraphSource) -> tuple[QualityGate | None, CalibrationText]:
        """Return what the model is measured by, and the text that its codes are found on."""
        plan, pieces = self.plan, self.plan.pieces
        unfinished = _unfinished(plan.out) / self.model.role
        if pieces is None:
            return None, CalibrationText((), unfinished)
        text = CalibrationText(pieces.fitted, unfinished, pieces.fitted_sources)
        if self.model.kind:  # what a head drafts is measured with its target
            return None, text
        gate = QualityGate(plan.engine, plan.quality, pieces.scored, pieces.sources)
        if self.target is not None and _reads_states(original):
            target = self.target.original
            encoder = SourceRun.beside(target.graph, target.weights)
            return gate.encoded(encoder), replace(text, sources=encoder.states(text.sources))
        return gate, text

    def _shares(self, draft: GraphSource) -> bool:
        """Tell whether a draft has no encoder, or one that its target has, too, bit for bit.

        Raises: CheckpointError for one without that does not fit its target's.
        """
        if self.target is None or not draft.parts:
            return False
        target = self.target.original
        return shares_encoder((target.graph, target.weights), (draft.graph, draft.weights))

    def _export(self, scratch: Path) -> GraphSource:
        """Return the portable graph that the recipe names, or export one."""
        model, graph, checkpoint = self.model, self.model.graph, self.model.checkpoint
        made = self.graphs / f"{model.role}.onnx"
        if model.head is not None:
            self.progress(f"export {model.role}", 0.0)
            return self._export_pair(model.head, scratch)
        if checkpoint.gguf is not None:
            self.progress(f"unpack {model.role}", 0.0)
            checkpoint.unpack()
        if graph is None:
            from specrt_export.portable.exporter import export_graph

            self.progress(f"export {model.role}", 0.0)
            graph = export_graph(checkpoint, made).path
            check_graph(graph, checkpoint, self.plan.engine.max_length)
        elif not is_attached(graph):
            self.progress(f"attach {model.role}", 0.0)
            graph = attach_graph(graph, checkpoint, made).path
            check_graph(graph, checkpoint, self.plan.engine.max_length)
        return GraphSource(graph, checkpoint.folder)

    def _export_pair(self, head: HeadCheckpoint, scratch: Path) -> GraphSource:
        """Export a target with the feature that its head reads, or that head."""
        from specrt_export.portable.exporter import export_graph, export_head

        model, length = self.model, self.plan.engine.max_length
        graph, weights = scratch / f"{model.role}.onnx", scratch / "weights"
        if model.kind:
            own = own_weights(head, scratch / "rotated.bin")
            checkpoint = linked(model.checkpoint, own, weights)
            export_head(head, checkpoint, graph, length)
        else:
            own = {**model.checkpoint.weights, **feature_weights(head)}
            checkpoint = linked(model.checkpoint, own, weights)
            export_graph(checkpoint, graph, head=head)
        check_graph(graph, checkpoint, length)
        return GraphSource(graph, weights)

    def _record(
        self, parameters: int, measured: MeasuredModel, compiled: CompiledModel
    ) -> ModelRecord:
        model, role, lowered, bits = self.model, self.model.role, measured.lowered, measured.bits
        precision = model.options.precision
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
            backend=model.options.backend,
            bits=bits,
            features=lowered.features,
            encoder=_placed(compiled.encoder, role),
            kind=model.kind,
            vocab_map="" if model.entries is None else VOCAB_MAP,
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
