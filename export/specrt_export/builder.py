"""Builds a bundle from a recipe: each model in turn, in a folder that then takes its place."""

from __future__ import annotations

import ctypes
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path

import specrt
from specrt.bundle import (
    FILE_NAME,
    FORMAT,
    Bundle,
    Manifest,
    ModelRecord,
    Provenance,
    Quality,
    hash_file,
)
from specrt.errors import (
    BuildError,
    CheckpointError,
    SpecrtError,
    how_to_install,
    one_line,
    shortage,
)
from specrt.params import AUTO
from specrt.system.doctor import missing_exporter
from specrt.system.memory import available_bytes
from specrt.text.tokenizer import Tokenizer
from specrt_export.check.equivalence import (
    Reference,
    check_engine,
    check_parity,
    max_width,
)
from specrt_export.check.quality import Likeliest, QualityGate, acceptance
from specrt_export.checkpoint import Checkpoint
from specrt_export.compile.compiler import (
    KV_BYTES,
    CompiledModel,
    Compiler,
    GraphSource,
    LoweredModel,
    Progress,
)
from specrt_export.inputs import (
    CalibrationPieces,
    ModelInputs,
    begin_token,
    calibration_path,
    check_graph,
    check_inputs,
    end_tokens,
    find_inputs,
    quantized_sources,
    read_calibration,
)
from specrt_export.portable.attachment import attach_graph, is_attached
from specrt_export.portable.external_data import external_tensors
from specrt_export.portable.graph import GraphRun, Tokens, read_graph, runs_here
from specrt_export.precision import BitBound
from specrt_export.provenance import oddity, origin, parameters
from specrt_export.quantize.bit_allocation import BitTrial, open_search
from specrt_export.quantize.calibration import CalibratedCodes, CalibrationText
from specrt_export.quantize.quantizer import Formats, Quantized, keep, quantize
from specrt_export.recipe import Recipe, settle

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
    _check_exporter(recipe)
    inputs = find_inputs(recipe)
    recipe = settle(recipe, quantized_sources(inputs))
    _check_place(out, recipe, inputs)
    builder = ModelBuilder.of(recipe)
    source = fingerprint(builder, inputs)
    check_inputs(recipe, inputs, out)
    pieces = _calibration(recipe, inputs[0].checkpoint)
    if pieces is not None:
        gate = QualityGate(recipe.engine, recipe.quality, pieces.scored)
        builder = replace(builder, gate=gate, fitted=pieces.fitted)
    with atomic_folder(out) as folder:
        builder.check()
        _warn(inputs, progress)
        models: dict[str, ModelRecord] = {}
        said: dict[str, Likeliest | None] = {}
        for number, model in enumerate(inputs):
            part = _part(progress, number, len(inputs))
            models[model.role], said[model.role] = builder.build(model, folder, out, part)
        progress("hash checkpoints", 0.95)
        origins = {model.role: _origin(recipe, model) for model in inputs}
        progress("write manifest", 0.97)
        _copy_tokenizer(inputs[0].checkpoint.folder, folder)
        manifest = _manifest(builder, models, inputs[0].checkpoint, source, folder)
        target, draft = said["target"], said.get("draft")
        if target is not None and draft is not None:
            manifest = replace(manifest, acceptance=acceptance(target, draft))
        manifest = replace(manifest, origins=origins)
        (folder / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")
    shutil.rmtree(_unfinished(out), ignore_errors=True)


def _check_exporter(recipe: Recipe) -> None:
    """Refuse a checkpoint without a graph, before it is fetched, where nothing can export it.

    Raises: BuildError.
    """
    absent = missing_exporter()
    if absent is not None and not all(source.graph for source in recipe.sources.values()):
        raise BuildError(
            f"exporting a checkpoint needs {absent}; install it with "
            f"`{how_to_install('export')}`, or name an exported `graph` in the recipe"
        )


def _origin(recipe: Recipe, model: ModelInputs) -> Provenance:
    """Return where the weights of a model are from."""
    return origin(model.checkpoint, model.hub, recipe.sources[model.role].revision)


def _warn(inputs: list[ModelInputs], progress: Progress) -> None:
    """Say what is lawful and strange: weights stored unlike the others, a draft that is larger."""
    for model in inputs:
        odd = oddity(model.checkpoint)
        if odd is not None:
            progress(f"warning: {model.role} {model.checkpoint.origin.name} is a mixture: {odd}", 0)
    sizes = [parameters(model.checkpoint) for model in inputs]
    if sizes[-1] > sizes[0]:
        progress(
            f"warning: the draft has {sizes[-1] / 1e6:.1f} M parameters and the target "
            f"{sizes[0] / 1e6:.1f} M: drafting takes longer than it saves; change their places",
            0,
        )


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


def _calibration(recipe: Recipe, target: Checkpoint) -> CalibrationPieces | None:
    """Read the calibration text before any work, where there is one and something to measure.

    Raises: BuildError.
    """
    if not recipe.quality.calibration or not any(p.rewrites for p in recipe.precisions.values()):
        return None
    tokenizer = Tokenizer(target.folder / "tokenizer.json", begin_token(target))
    fits = any(p.calibrated for p in recipe.precisions.values())
    return read_calibration(
        calibration_path(recipe), tokenizer, recipe.engine.max_length, fits=fits
    )


def _part(progress: Progress, number: int, parts: int) -> Progress:
    """Give one model's share of the bar; the manifest is the last twentieth."""
    return lambda stage, done: progress(stage, 0.95 * (number + done) / parts)


def _copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


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
        versions=builder.versions(),
        device={"machine": platform.machine(), "system": platform.system()},
        source=source,
        files={p.relative_to(folder).as_posix(): hash_file(p) for p in files},
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
    return sum(prod(t.dims) for t in external_tensors(read_graph(source.graph)))


@dataclass(frozen=True)
class MeasuredModel:
    """A lowered model, and how far it is from its checkpoint, where that was measured."""

    quantized: Quantized | None
    lowered: LoweredModel
    quality: Quality | None = None
    likeliest: Likeliest | None = None
    bits: dict[str, str] | None = None
    """Of each part whose bits were chosen, what it is stored as."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of its weights; of a plan that is still to be built, the graph's."""
        files = (path.stat().st_size for path in self.lowered.folder.iterdir())
        return self.lowered.weight_bytes or sum(files)

    def moved(self, folder: Path, bits: dict[str, str]) -> MeasuredModel:
        """Return it as it lies in another folder, with the bits that were chosen."""
        assert self.quantized is not None
        quantized = replace(self.quantized, folder=folder / self.quantized.folder.name)
        lowered = replace(self.lowered, folder=folder / self.lowered.folder.name)
        return replace(self, quantized=quantized, lowered=lowered, bits=bits)


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
        self, model: ModelInputs, folder: Path, previous: Path, progress: Progress
    ) -> tuple[ModelRecord, Likeliest | None]:
        """Build an engine, compare it with its graph, and measure what quantizing did.

        `folder` is the bundle that is built, `previous` where an older one may be.
        Raises: SpecrtError.
        """
        role = model.role
        compiler = self.compilers[role]

        def compiled_part(stage: str, done: float) -> None:
            progress(f"{role}: {stage}", 0.6 + 0.4 * done)

        with tempfile.TemporaryDirectory(dir=folder) as name:
            scratch = Path(name)
            original = self._export(model, scratch, progress)
            # Of the checkpoint: a quantized graph has scales besides, and may hold a table twice.
            parameters = _parameters(original)
            if model.checkpoint.coded:
                kept = keep(original.graph, model.checkpoint, scratch / "kept")
                original = GraphSource(kept.graph, kept.folder)
            self._compare_with_model(model, original, parameters, progress)
            measured = self._measured(role, original, scratch, _unfinished(previous), progress)
            progress(f"compile {role}", 0.6)
            lowered = measured.lowered
            compiled = compiler.compile(lowered, folder / role, previous / role, compiled_part)
            return self._record(parameters, measured, compiled), measured.likeliest

    def _measured(
        self, role: str, original: GraphSource, scratch: Path, unfinished: Path, progress: Progress
    ) -> MeasuredModel:
        """Quantize, lower and measure a model, with the best bits where they are chosen.

        Raises: BuildError beyond a limit of the recipe.
        """
        bound = self.recipe.bound_of(role)
        if bound is None:
            text = CalibrationText(self.fitted, unfinished / role)
            found = self._try(role, original, scratch / "new", progress, text=text)
        else:
            found = self._choose_bits(role, bound, original, scratch, unfinished / role, progress)
        if self.gate is not None and found.quantized is not None and found.quality is not None:
            self.gate.check(role, original, found.quantized, found.quality)
        return found

    def _choose_bits(
        self, role: str, bound: BitBound, original: GraphSource, scratch: Path, unfinished: Path,
        progress: Progress,
    ) -> MeasuredModel:  # fmt: skip
        """Try bits until the whole model keeps to a bound; return the best."""
        assert self.gate is not None, "the recipe was held to a calibration text"

        def show(stage: str, done: float) -> None:
            progress(f"{role}: {stage}", 0.1 + 0.1 * done)

        search, codes = open_search(
            original.graph, original.weights, self.recipe.precisions[role], bound,
            CalibrationText(self.fitted or self.gate.pieces, unfinished), show,
        )  # fmt: skip
        best: MeasuredModel | None = None
        while (raised := search.propose()) is not None:
            folder = scratch / "new"
            found = self._try(role, original, folder, progress, search.formats(raised), codes)
            assert found.quality is not None, "a quantized model is measured"
            trial = BitTrial(raised, found.quality.kl, found.weight_bytes)
            progress(f"{role}: {search.told(trial)}", 0.55)
            shutil.rmtree(scratch / ("best" if search.record(trial) else "new"), ignore_errors=True)
            if folder.is_dir():
                folder.rename(scratch / "best")
                best = found.moved(scratch / "best", search.bits(raised))
        assert best is not None, "a search ends with a trial or with an error"
        return best

    def _try(
        self, role: str, original: GraphSource, folder: Path, progress: Progress,
        formats: Formats | None = None, codes: CalibratedCodes | None = None,
        text: CalibrationText | None = None,
    ) -> MeasuredModel:  # fmt: skip
        """Quantize and lower a model, compare it with its graph, and measure what it lost."""
        quantized = self._quantize(role, original, folder, progress, formats, codes, text)
        source = original
        if quantized is not None:
            source = GraphSource(quantized.graph, quantized.folder)
        progress(f"lower {role}", 0.3)
        lowered = self.compilers[role].lower(role, source, folder / "lowered")
        if lowered.warning:
            progress(f"warning: {lowered.warning}", 0.4)
        progress(f"check {role}", 0.4)
        self._check(source, lowered)
        if self.gate is None:
            return MeasuredModel(quantized, lowered)
        progress(f"measure {role}", 0.5)
        if quantized is None:
            return MeasuredModel(quantized, lowered, likeliest=self.gate.likeliest(original))
        with self.compilers[role].score(lowered, self.gate.max_width) as engine:
            quality, likeliest = self.gate.measure(role, original, folder, engine)
        return MeasuredModel(quantized, lowered, quality, likeliest)

    def _export(self, model: ModelInputs, scratch: Path, progress: Progress) -> GraphSource:
        """Return the portable graph that the recipe names, or export one."""
        graph, checkpoint = model.graph, model.checkpoint
        if checkpoint.gguf is not None:
            progress(f"unpack {model.role}", 0.0)
            checkpoint.unpack()
        if graph is None:
            progress(f"export {model.role}", 0.0)
            graph = _export(checkpoint, scratch / f"{model.role}.onnx")
            check_graph(graph, checkpoint, self.recipe.engine.max_length)
        elif not is_attached(graph):
            progress(f"attach {model.role}", 0.0)
            graph = attach_graph(graph, checkpoint, scratch / f"{model.role}.onnx").path
            check_graph(graph, checkpoint, self.recipe.engine.max_length)
        return GraphSource(graph, checkpoint.folder)

    def _compare_with_model(
        self, model: ModelInputs, source: GraphSource, parameters: int, progress: Progress
    ) -> None:
        """Compare the portable graph with transformers, where that is installed and has room."""
        if not (runs_here() and all(map(find_spec, ("torch", "transformers")))):
            return
        reference, reason = _open_reference(model.checkpoint, parameters)
        if reference is None:
            progress(f"warning: {model.role} is not compared with transformers: {reason}", 0.1)
            return
        progress(f"compare {model.role} with transformers", 0.1)
        check_parity(model.checkpoint, source.graph, reference=reference, folder=source.weights)

    def _quantize(
        self, role: str, original: GraphSource, folder: Path, progress: Progress,
        formats: Formats | None, codes: CalibratedCodes | None, text: CalibrationText | None,
    ) -> Quantized | None:  # fmt: skip
        precision = self.recipe.precisions[role]
        if not precision.rewrites:
            return None
        progress(f"{'quantize' if precision.quantizes else 'narrow'} {role}", 0.2)

        def calibrated(part: str, done: float) -> None:
            progress(f"calibrate {role}, {part}", 0.2 + 0.1 * done)

        return quantize(
            original.graph, original.weights, folder / "quantized", precision, calibrated,
            text if precision.calibrated else None, formats, codes,
        )  # fmt: skip

    def _check(self, source: GraphSource, lowered: LoweredModel) -> None:
        """Compare an engine with its graph, where the ONNX Runtime installed can run that."""
        if not runs_here():
            return
        options, role = self.recipe.engine, lowered.role
        widths = sorted({1, options.widest})
        widest = max_width(lowered.geometry, options.max_length, widths)
        with self.compilers[role].score(lowered, widest, exact=True) as engine:
            reference = GraphRun(source.graph, source.weights)
            check_engine(reference, engine, widths, lowered.compute, self.recipe.backend_of(role))

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
            quality=measured.quality,
            backend=self.recipe.backend_of(role),
            bits=bits,
        )


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
            digest.update(calibration_path(recipe).read_bytes())
    for model in inputs:
        if model.graph is not None:
            digest.update(model.graph.read_bytes())
        for path in model.checkpoint.files:
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.hexdigest()


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
    why = f"the build stopped: {error.strerror or error} ({place})"
    return BuildError("; ".join(filter(None, (why, f"{out} is as it was", shortage(error)))))


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
        match = _LEFT.fullmatch(left.name.removeprefix(f".{out.name}."))
        if match is None or _alive(int(match[1])):
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
