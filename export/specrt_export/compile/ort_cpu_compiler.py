"""Compiles a portable graph for ONNX Runtime on a CPU: lower, optimise, write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from onnx import helper

from specrt.bundle import BLOCK_HEAD, HEADS, KINDS, KV_HEAD, EncoderRecord
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.encoder_decoder_engine import NEEDS_KERNELS
from specrt.engine.ort.kernels import CONTRIB, LAYOUT, missing_kernels
from specrt.engine.ort.ort_engine import packed_shape, silent_options
from specrt.engine.protocol import Engine
from specrt.errors import BuildError, first_line
from specrt.geometry import LAG, Geometry
from specrt_export.compile.compiler import (
    CompiledModel,
    GraphSource,
    LoweredModel,
    MadeUpTarget,
    Progress,
    encoder_record,
)
from specrt_export.heads.dflash_format import CONTEXT
from specrt_export.heads.eagle3_format import HIDDEN
from specrt_export.lower.attention import as_wide_as_keys
from specrt_export.lower.cpu_lowering import lower_cpu
from specrt_export.lower.encoder_lowering import lower_encoder
from specrt_export.lower.lazy_tensor import (
    ENGINE,
    LazyTensor,
    stored_weights,
    weight_bytes,
    write_engine,
)
from specrt_export.lower.ort_lowering import OrtTarget, lower
from specrt_export.lower.view import Lowered
from specrt_export.portable.experts_function import mixes
from specrt_export.portable.external_data import disk_full
from specrt_export.portable.graph import (
    MODEL_TYPE,
    PARTS,
    check_length,
    facts_of,
    feature_width,
    geometry_of,
    read_graph,
    source_of,
)
from specrt_export.recipe.model_options import ModelOptions
from specrt_export.recipe.recipe_tables import EngineOptions

BACKEND = "ort-cpu"


@dataclass(frozen=True)
class OrtCpuCompiler:
    """The compiler of `ort-cpu`; see `Compiler`."""

    model: ModelOptions

    def check(self, *, measured: bool) -> None:
        """Accept everything: what a recipe may ask of a CPU was checked when it was read."""

    def versions(self) -> dict[str, str]:
        """Return the version of ONNX Runtime, and the layout for the kernels that are here."""
        return {"onnxruntime": ort.__version__, "kernels": CONTRIB if missing_kernels() else LAYOUT}

    def lower(self, source: GraphSource, folder: Path) -> LoweredModel:
        """Write the engine itself: nothing is left to compile."""
        options, role = self.model.engine, self.model.role
        portable = read_graph(source.graph)
        self.model.check_layers(geometry_of(portable), mixes=mixes(portable))
        return compile_ort_cpu(
            source.graph,
            source.weights,
            folder,
            options.max_length,
            role=role,
            batch=options.batch,
            max_source=options.max_source,
            max_width=options.max_width,
            confidence=role == "draft",  # what stops a draft early; a target has no use for it
        )

    @contextmanager
    def score(
        self, lowered: LoweredModel, max_width: int, *, exact: bool = False
    ) -> Iterator[Engine]:
        """Open the engine; an exact one multiplies with fp32 activations."""
        file = lowered.folder / ENGINE
        with ExitStack() as copies:
            if exact:
                file = copies.enter_context(exact_copy(file))
                encoder = lowered.encoder and _exact_parts(lowered.encoder, lowered.folder, copies)
                lowered = replace(lowered, encoder=encoder)
            opened = open_ort_cpu(lowered, self.model.engine, max_width, file)
            yield copies.enter_context(opened)

    def compile(
        self, lowered: LoweredModel, out: Path, previous: Path, progress: Progress
    ) -> CompiledModel:
        """Put the engine in its place."""
        return move_engine(lowered, out)


def _exact_parts(encoder: EncoderRecord, folder: Path, copies: ExitStack) -> EncoderRecord:
    """Return an encoder whose products are in fp32, while the copies last."""
    cross, own = (
        copies.enter_context(exact_copy(folder / name)).name if name else ""
        for name in (encoder.cross, encoder.encoder)
    )
    return replace(encoder, cross=cross, encoder=own)


@contextmanager
def open_ort_cpu(
    lowered: LoweredModel, options: EngineOptions, max_width: int, file: Path | None = None
) -> Iterator[Engine]:
    """Open an engine, or a copy of it in its folder, with all cores, and close it.

    A head reads features that are made up.
    """
    shape = options.batch, options.max_length, lowered.features
    target: Any = None
    if lowered.model_type in HEADS:
        target = MadeUpTarget(shape, _lent_shapes(lowered.geometry, options))
    # Rings are as long as the passes of the recipe want them.
    rings = target is None and any(one.seen for one in lowered.geometry.buffers.values())
    widest = min(options.max_width, options.max_length) if rings else max_width
    engine = open_engine(
        EngineSpec(
            BACKEND, file or lowered.folder / ENGINE, lowered.geometry, options.batch,
            options.max_length, widest, len(os.sched_getaffinity(0)), lowered.engine_kind,
            lowered.encoder, target,
        )
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


def _lent_shapes(geometry: Geometry, options: EngineOptions) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a head reads of its target, by names there."""
    shapes = {}
    for name, own in geometry.lent.items():
        one = geometry.inputs[name]
        positions = one.positions(options.max_length, options.max_width)
        shapes[own] = packed_shape(name, one.heads, one.width, options.batch, positions)
    return shapes


def move_engine(lowered: LoweredModel, out: Path) -> CompiledModel:
    """Move an engine that lowering wrote, and what conditions it, into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    for part in ("engine", *PARTS):
        for name in (f"{part}.onnx", f"{part}.data"):
            if (lowered.folder / name).is_file():
                shutil.move(lowered.folder / name, out / name)
    return CompiledModel(ENGINE, lowered.weight_bytes, lowered.encoder)


def compile_ort_cpu(
    graph: Path,
    checkpoint: Path,
    out: Path,
    max_length: int,
    *,
    role: str = "target",
    batch: int = 1,
    max_source: int = 0,
    max_width: int = 0,
    accuracy_level: int = 4,
    confidence: bool = False,
) -> LoweredModel:
    """Write `engine.onnx` and `engine.data` for a portable graph into a folder.

    It is in the operators of the CPU kernels, and in those of ONNX Runtime where they are missing.
    Of an encoder-decoder `encoder` and `cross` are written, too, in the former alone; `max_source`
    are the positions of its longest source, see `EngineOptions.source_positions`. Where passes have
    `max_width` tokens at most, layers that see few positions keep no more; see `Buffer.ring`.
    Weights are read, changed and written a slice at a time, never all at once.
    Raises: BuildError, CheckpointError, ExportError for what is not a portable graph.
    """
    portable = read_graph(graph)
    geometry = geometry_of(portable)
    check_length(geometry, max_length, checkpoint)
    contrib = bool(missing_kernels())
    if contrib:
        geometry = as_wide_as_keys(geometry)
    source = source_of(portable)
    positions = 0
    if source is not None:
        options = EngineOptions(max_source=max_source)
        positions = options.source_positions(source.max_source, features=bool(source.features))
    needs = (BLOCK_HEAD, any(i.name == CONTEXT for i in portable.graph.input))
    for kind, there in (needs, (KV_HEAD, bool(geometry.lent))):
        if contrib and there:
            raise BuildError(f"{KINDS[kind]} runs on specrt's kernels: {missing_kernels()}")
    even = contrib and role == "target"  # of a target alone rows are compared between passes
    is_head = any(i.name in (CONTEXT, HIDDEN) for i in portable.graph.input) and not geometry.lent
    target = OrtTarget(
        geometry, max_length, batch, accuracy_level, confidence, positions,
        0 if contrib or is_head else max_width, LAG if role == "draft" else 0, even,
    )  # fmt: skip
    if source is not None and contrib:
        raise BuildError(
            f"{checkpoint} is an encoder-decoder: {NEEDS_KERNELS}: {missing_kernels()}"
        )
    lowered = (lower if contrib else lower_cpu)(
        portable, stored_weights(portable, checkpoint), target
    )
    out.mkdir(parents=True, exist_ok=True)
    size, fused = _write(lowered, out, "engine"), lowered.fused
    encoder = None
    if source is not None:
        parts = GraphSource(graph, checkpoint).parts
        for part, path in parts.items():
            own = read_graph(path)
            made = lower_encoder(own, stored_weights(own, checkpoint), target)
            size += _write(made, out, part)
            fused |= {f"{part} {rewrite}": ratio for rewrite, ratio in made.fused.items()}
        encoder = encoder_record(source, positions, parts)
    kind = facts_of(portable).get(MODEL_TYPE, "unknown")
    features = feature_width(portable)
    return LoweredModel(role, out, geometry, "fp32", kind, fused, size, features, encoder)


def _write(lowered: Lowered, out: Path, part: str) -> int:
    """Optimise a lowered graph and write it; return the bytes of its weights."""
    model = optimise(lowered.model, lowered.weights, out)
    write_engine(model, lowered.weights, out, part)
    return weight_bytes(model, lowered.weights)


_OPTIMISED = "optimised.onnx"


def optimise(
    model: onnx.ModelProto, weights: Mapping[str, LazyTensor], folder: Path
) -> onnx.ModelProto:
    """Return a graph as ONNX Runtime optimises it; weights are inputs meanwhile.

    What a fusion of its own would have to know of a weight, a rewrite of ours has done before.
    Raises: BuildError when the library refuses the graph.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    placeholders = [t for t in model.graph.initializer if t.name in weights]
    inline = [t for t in model.graph.initializer if t.name not in weights]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(inline)
    bare.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in placeholders
    )
    optimised = onnx.load(_optimise(bare, folder))
    (folder / _OPTIMISED).unlink()
    return _restored(optimised, {t.name: t for t in placeholders})


def _optimise(model: onnx.ModelProto, folder: Path) -> Path:
    options = silent_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / _OPTIMISED)
    try:
        ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:  # the library raises its own pybind types
        reason = first_line(error)
        if "serialization failed" in reason:  # said of a full disk
            raise disk_full(folder / _OPTIMISED) from error
        raise BuildError(f"ONNX Runtime {ort.__version__} could not compile: {reason}") from error
    return folder / _OPTIMISED


def _restored(
    model: onnx.ModelProto, placeholders: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    inputs = [i for i in model.graph.input if i.name not in placeholders]
    read = {name for node in model.graph.node for name in node.input}
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(t for name, t in placeholders.items() if name in read)
    return model


_EXACT = {"exact": 1, "accuracy_level": 1}
"""Of the kernels' products and of MatMulNBits: multiply with activations in fp32, not int8."""


@contextmanager
def exact_copy(engine: Path) -> Iterator[Path]:
    """Give a copy of an engine that computes products of quantized weights in fp32.

    The copy reads the engine's own weights, and is gone afterwards.
    """
    model = onnx.load(engine, load_external_data=False)
    levels = [a for node in model.graph.node for a in node.attribute if a.name in _EXACT]
    if not levels:
        yield engine
        return
    for level in levels:
        level.i = _EXACT[level.name]
    copy = engine.with_name(f"exact.{engine.name}")
    copy.write_bytes(model.SerializeToString())
    try:
        yield copy
    finally:
        copy.unlink()
