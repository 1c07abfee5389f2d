"""Compiles a portable graph for ONNX Runtime on an NVIDIA GPU; no GPU is needed to do so."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort
from onnx import helper

from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.cuda_engine import CAPTURED, OrtCudaEngine
from specrt.engine.protocol import Engine
from specrt.errors import BuildError
from specrt.geometry import ATTENTION, Geometry
from specrt_export.compile.compiler import CompiledModel, GraphSource, LoweredModel, Progress
from specrt_export.compile.ort_cpu_compiler import move_engine
from specrt_export.lower.attention import as_wide_as_keys
from specrt_export.lower.half import TYPES, halve, keep_on_device, widened_folder
from specrt_export.lower.lazy_tensor import ENGINE, stored_weights, weight_bytes, write_engine
from specrt_export.lower.ort_lowering import OrtTarget, lower
from specrt_export.lower.view import GraphView, Lowered
from specrt_export.portable.experts_function import mixes
from specrt_export.portable.graph import MODEL_TYPE, check_length, facts_of, geometry_of, read_graph
from specrt_export.recipe.model_options import ModelOptions


@dataclass(frozen=True)
class OrtCudaCompiler:
    """The compiler of `ort-cuda`; see `Compiler`."""

    model: ModelOptions

    def check(self, *, measured: bool) -> None:
        """Accept everything: what the kernels do not take depends on the model."""

    def versions(self) -> dict[str, str]:
        """Return the version of ONNX Runtime."""
        return {"onnxruntime": ort.__version__}

    def lower(self, source: GraphSource, folder: Path) -> LoweredModel:
        """Write the engine itself: nothing is left to compile."""
        options = self.model.engine
        portable = read_graph(source.graph)
        self.model.check_layers(geometry_of(portable), mixes=mixes(portable))
        return compile_ort_cuda(
            source.graph,
            source.weights,
            folder,
            options.max_length,
            role=self.model.role,
            compute=compute_type(self.model.precision.layers),
            captured=options.widest,
            batch=options.batch,
            confidence=self.model.role == "draft",
        )

    @contextmanager
    def score(
        self, lowered: LoweredModel, max_width: int, *, exact: bool = False
    ) -> Iterator[Engine]:
        """Open the engine on the CPU provider.

        It runs an fp16 engine as it is, computing in fp32 where it has no kernel, and a bf16 one
        with its weights widened.
        """
        with on_cpu(
            lowered.folder, lowered.geometry, self.model.engine.max_length, max_width
        ) as engine:
            yield engine

    def compile(
        self, lowered: LoweredModel, out: Path, previous: Path, progress: Progress
    ) -> CompiledModel:
        """Put the engine in its place."""
        return move_engine(lowered, out)


_HEAD_STEP, _WIDEST_HEAD = 8, 512


def compute_type(precision: str) -> str:
    """Return what an engine computes in, from what the weights of its layers are stored as.

    Whole numbers are multiplied with fp16 activations.
    """
    return "bf16" if precision == "bf16" else "fp16"


def compile_ort_cuda(
    graph: Path,
    checkpoint: Path,
    out: Path,
    max_length: int,
    *,
    compute: str = "fp16",
    role: str = "target",
    captured: int = 1,
    batch: int = 1,
    confidence: bool = False,
) -> LoweredModel:
    """Write `engine.onnx` and `engine.data` for a portable graph into a folder.

    Passes of up to `captured` tokens are run as CUDA graphs. Weights are read, narrowed and
    written a slice at a time.
    Raises: BuildError, CheckpointError, ExportError for what is not a portable graph.
    """
    portable = read_graph(graph)
    geometry = as_wide_as_keys(geometry_of(portable))
    check_length(geometry, max_length, checkpoint)
    _check(geometry, batch, compute)
    target = OrtTarget(geometry, max_length, batch, confidence=confidence)
    lowered = lower(portable, stored_weights(portable, checkpoint), target)
    _check_fused(lowered)
    view = GraphView(lowered.model, lowered.weights)
    keep_on_device(view, max_length)
    # Where has no CUDA kernel for bf16.
    halve(view, compute, {node.output[0] for node in view.nodes("Where")})
    model = view.tidy()
    helper.set_model_props(model, {**facts_of(model), CAPTURED: str(captured)})
    out.mkdir(parents=True, exist_ok=True)
    weights = view.weights()
    write_engine(model, weights, out)
    size = weight_bytes(model, weights)
    kind = facts_of(portable).get(MODEL_TYPE, "unknown")
    return LoweredModel(role, out, geometry, compute, kind, lowered.fused, size)


def _check(geometry: Geometry, batch: int, compute: str) -> None:
    """Refuse what the CUDA kernels of ONNX Runtime do not take."""
    memories = [one for one in geometry.memories if one.kind == ATTENTION]
    heads = {one.key_width for one in memories}
    if compute not in TYPES:
        raise BuildError(f"compute type is {compute!r}; expected {' or '.join(TYPES)}")
    if batch != 1:
        raise BuildError(
            f"engine.batch is {batch}, and ort-cuda builds batch 1: its attention takes several "
            "tokens at once for one row only. Build with batch 1"
        )
    if any(head % _HEAD_STEP or head > _WIDEST_HEAD for head in heads):
        raise BuildError(
            f"the model has heads of {', '.join(map(str, sorted(heads)))}, and ort-cuda needs "
            f"multiples of {_HEAD_STEP} up to {_WIDEST_HEAD}; build for ort-cpu"
        )
    if any(one.value_width > one.key_width for one in memories):
        raise BuildError(
            "the model has values that are wider than its keys, and ort-cuda keeps no wider ones; "
            "build for ort-cpu"
        )


def _check_fused(lowered: Lowered) -> None:
    fused, layers = lowered.fused.get("attention", "0/0").split("/")
    if fused != layers:
        raise BuildError(
            f"{fused} of {layers} attention layers could be fused, and ort-cuda needs all of them; "
            "build for ort-cpu, and please report the architecture"
        )


@contextmanager
def on_cpu(engine: Path, geometry: Geometry, max_length: int, max_width: int) -> Iterator[Engine]:
    """Open the ort-cuda engine of a folder on the CPU provider."""
    with tempfile.TemporaryDirectory(dir=engine.parent) as scratch:
        folder = widened_folder(engine, Path(scratch))
        spec = EngineSpec("ort-cuda", folder / ENGINE, geometry, 1, max_length, max_width)
        opened = OrtCudaEngine(spec, device="cpu")
        try:
            yield opened
        finally:
            opened.close()
