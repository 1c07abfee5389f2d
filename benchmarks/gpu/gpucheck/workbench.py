"""What steps work with: devices, engines, bundles, and targets grown to the cost of larger ones.

A grown target is codelet's (see tools/inflate.py): its text at a larger model's cost, beside
codelet's own draft.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gpucheck.evidence import Evidence, NotRunError
from gpucheck.inventory import TENSORRT, Machine
from gpucheck.settings import (
    ATTENTION,
    CODELET,
    HEAD,
    MAX_LENGTH,
    PREFILL,
    SCRIPT,
    RunSettings,
)
from specrt.bundle import Geometry, read_manifest
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.cuda_engine import OrtCudaEngine
from specrt.engine.protocol import Engine
from specrt.engine.tensorrt.device import CudaDevice, cuda_bindings
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN, EngineRecord, read_engine_record
from specrt.engine.tensorrt.fused_round import fused_rounds
from specrt.engine.tensorrt.head import TensorRtHead
from specrt.engine.tensorrt.library import (
    DECOMPOSED,
    NATIVE,
    lacks_to_build,
    open_library,
)
from specrt.engine.tensorrt.plan import open_plan
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.loading import load
from specrt.speculation.pool import Models
from specrt.text.tokenizer import Tokenizer
from specrt_export.builder import build
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.compile.network import CURRENT, profiles
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from specrt_export.compile.plan_builder import build_plan
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS, stored_weights, write_engine
from specrt_export.lower.tensorrt_lowering import TensorRtTarget, lower_tensorrt, mark_decomposable
from specrt_export.plan.build_plan import resolve
from specrt_export.portable.graph import GraphRun, geometry_of, read_graph
from specrt_export.precision import SCALED, Precision
from specrt_export.quantize.quantizer import quantize
from specrt_export.recipe.recipe import Recipe, read_recipe
from specrt_export.recipe.recipe_tables import ModelSource, PlanOptions

RTX = "tensorrt-rtx"
FACTS = "built.json"
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}
CANDIDATES = 64
FP8_FROM = 8.9
SPARE_DISK = 1.1
"""What has to be free, as a factor of what a build writes."""


@dataclass(frozen=True)
class Built:
    """One compiled model, as it is known without opening it."""

    path: Path
    """The plan, or the graph of ort-cuda."""
    backend: str
    geometry: Geometry
    read_bytes: int
    """Of weights: what a pass has to read at least, each once."""
    precision: str = "fp16"
    max_length: int = MAX_LENGTH
    max_width: int = PREFILL
    source: str = ""
    """Hash of all that it was built from."""

    @property
    def record(self) -> EngineRecord:
        """What is known of a plan."""
        return read_engine_record(self.path.with_name(FILE_NAME))

    def write(self) -> None:
        """Write all this beside the engine."""
        data = {**asdict(self), "path": self.path.name, "geometry": self.geometry.to_json()}
        self.path.with_name(FACTS).write_text(json.dumps(data), encoding="utf-8")


@dataclass(frozen=True)
class Source:
    """A portable graph, and the folder of its weights."""

    graph: Path
    weights: Path
    role: str = "target"


@dataclass
class Workbench(Machine):
    """Opens what a step needs; tests replace what needs a GPU."""

    settings: RunSettings = field(default_factory=RunSettings)

    def new_device(self) -> Any:
        """Open the GPU.

        Raises: NotRunError where the CUDA bindings are missing.
        """
        try:
            cuda_bindings()
        except EngineError as error:
            raise NotRunError(str(error)) from error
        return CudaDevice()

    @contextmanager
    def device(self, backend: str) -> Iterator[Any]:
        """Give a device for plans, and None for ONNX Runtime, which opens its own."""
        device = self.new_device() if backend in TENSORRT else None
        try:
            yield device
        finally:
            if device is not None:
                device.close()

    def open(self, built: Built, device: Any = None, *, capture: bool = True) -> Engine:
        """Open an engine, whether or not its library lists this GPU."""
        spec = EngineSpec(
            built.backend, built.path, built.geometry, 1, built.max_length, built.max_width
        )
        if built.backend in TENSORRT:
            record = built.record
            plan = open_plan(built.path, open_library(built.backend), device, record.wants)
            return TensorRtEngine(plan, device, record, spec, capture=capture)
        return OrtCudaEngine(spec, capture=capture)

    @contextmanager
    def engines(self, *models: Built) -> Iterator[list[Any]]:
        """Open engines on one device, and close them all whatever happens."""
        with self.device(models[0].backend) as device:
            engines: list[Any] = []
            try:
                for built in models:
                    engines.append(self.open(built, device))
                yield engines
            finally:
                for engine in engines:
                    engine.close()

    @contextmanager
    def pair(self, target: Built, draft: Built) -> Iterator[Generator]:
        """Open a target with a draft beside it, on one device."""
        tokenizer = Tokenizer(CODELET / "checkpoint" / "target" / "tokenizer.json", None)
        with self.engines(target, draft) as engines:
            gammas = (0, *self.settings.gammas)
            one, other = engines
            if isinstance(other, TensorRtEngine) and other.model.record.hidden:
                other = TensorRtHead(other, one)
            yield Generator(Models(one, other, gammas, rounds=fused_rounds(one, other)), tokenizer)

    @contextmanager
    def bundle(self, pair: str, backend: str) -> Iterator[Generator]:
        """Open a bundle as a user would, but for plans of another GPU, which no user could."""
        models = [self.codelet(backend, role, pair) for role in ("target", "draft")]
        foreign = backend == RTX and self.settings.capabilities not in ((), (CURRENT,))
        opened: Any = (
            self.pair(*models)
            if foreign
            else load(self.bundle_folder(pair, backend), text_memory_bytes=0)
        )
        with opened as generator:
            yield generator

    def reference(self, role: str) -> GraphRun:
        """Return codelet's portable graph in fp32 on the CPU."""
        source = codelet_source(role)
        return GraphRun(source.graph, source.weights)

    # What is built, and where it is.

    def bundle_folder(self, pair: str, backend: str) -> Path:
        """Return the folder of a bundle."""
        return self.settings.work / f"{pair}-{backend}"

    def engine_folder(self, size: str, precision: str, backend: str) -> Path:
        """Return the folder of a grown target's engine."""
        return self.bundle_folder(f"{size}-{precision}", backend)

    def codelet(self, backend: str, role: str, pair: str = "codelet") -> Built:
        """Return a model of codelet's bundle.

        Raises: NotRunError where it was not built.
        """
        folder = self.bundle_folder(pair, backend)
        if not (folder / "manifest.json").is_file():
            raise NotRunError(f"{folder.name} was not built: its build step comes first")
        manifest = read_manifest(folder)
        model = manifest.target if role == "target" else manifest.draft
        assert model is not None, "codelet has a draft"
        size = model.parameters * ITEM_BYTES.get(model.precision, 2)
        return Built(
            folder / model.engine, manifest.backend_of(model), model.geometry, size,
            model.precision, manifest.max_length, manifest.max_width,
        )  # fmt: skip

    def target(self, size: str, precision: str, backend: str) -> Built:
        """Return the target of a size, or of one of codelet's bundles.

        Raises: NotRunError where it was not built.
        """
        if size == "codelet" or size in ATTENTION:
            return self.codelet(backend, "target", size)
        return self.built(self.engine_folder(size, precision, backend))

    def built(self, folder: Path) -> Built:
        """Return the engine of a folder.

        Raises: NotRunError where it was not built.
        """
        if not (folder / FACTS).is_file():
            raise NotRunError(f"{folder.name} was not built: its build step comes first")
        data = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        data |= {"geometry": Geometry.from_json(data["geometry"]), "path": folder / data["path"]}
        return Built(**data)

    # Building.

    def build_bundle(self, pair: str, backend: str, evidence: Evidence) -> None:
        """Build a recipe of this folder as `specrt build` does; a fresh bundle stays."""
        self._require_builder(backend)
        name = "mixed" if pair == "mixed" else "codelet"
        recipe = read_recipe(SCRIPT / f"{name}.toml", backend=None if pair == "mixed" else backend)
        recipe = replace(recipe, engine=replace(recipe.engine, gammas=self.settings.gammas))
        if backend == RTX:
            wanted = {"capabilities": self.settings.capabilities, **ATTENTION.get(pair, {})}
            recipe = replace(recipe, tensorrt=replace(recipe.tensorrt, **wanted))
        if pair == HEAD:
            recipe = self._with_head(recipe)
        out, began = self.bundle_folder(pair, backend), time.monotonic()
        plan = resolve(recipe, out)
        evidence.add(reused=plan.is_fresh())
        if not evidence.facts["reused"]:
            if pair == HEAD and not find_spec("torch"):
                raise NotRunError("a head is exported, which needs torch; carry its bundle here")
            self.settings.work.mkdir(parents=True, exist_ok=True)
            build(plan)
        evidence.add(build_seconds=round(time.monotonic() - began, 1))
        evidence.add(versions=read_manifest(out).versions)
        for role in ("target", "draft"):
            model = self.codelet(backend, role, pair)
            part = evidence.part(role)
            part.add(read_bytes=model.read_bytes)
            if model.backend in TENSORRT:
                part.add(profiles=_profiles(model.record))

    def _with_head(self, recipe: Recipe) -> Recipe:
        """Return a recipe with a random head in the place of the draft."""
        folder = self.settings.work / "random-head"
        if not (folder / "model.safetensors").is_file():
            write_head(folder)
        source = ModelSource(str(folder), precision=recipe.target.precision)
        return replace(recipe, target=replace(recipe.target, graph=""), draft=source)

    @contextmanager
    def cpu_pair(self, pair: str = "codelet") -> Iterator[Generator]:
        """Open codelet, or its target with a head, in fp32 on the CPU; build what is missing."""
        bundle = self.bundle_folder(pair, "ort-cpu")
        recipe = read_recipe(CODELET / "recipe.toml", backend="ort-cpu")
        if pair == HEAD:
            recipe = self._with_head(recipe)
        plan = resolve(recipe, bundle)
        if not plan.is_fresh():
            self.settings.work.mkdir(parents=True, exist_ok=True)
            build(plan)
        with load(bundle, text_memory_bytes=0) as generator:
            yield generator

    def export_grown(self, size: str, evidence: Evidence) -> None:
        """Export the graph of a grown target from its config; needs torch, and no weights."""
        from growth.config import grown_config
        from growth.shape import PRESETS, Shape

        out = self.graph(size)
        evidence.add(shape=str(PRESETS[size]), reused=out.is_file())
        if out.is_file():
            return
        try:
            from specrt_export.portable.exporter import export_graph
        except ImportError as error:
            raise NotRunError(f"exporting needs {error.name}") from error
        config = json.loads((CODELET / "checkpoint" / "target" / "config.json").read_text("utf-8"))
        grown = grown_config(config, Shape.of(config), PRESETS[size], "float16", "gpu-check")
        folder = out.with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(grown), encoding="utf-8")
        export_graph(Checkpoint.open(folder, config_only=True), out)
        evidence.add(graph_bytes=out.stat().st_size)

    def graph(self, size: str) -> Path:
        """Return where the graph of a grown target is; its weights are elsewhere."""
        return self.settings.work / "graphs" / f"{size}.onnx"

    def grow(self, size: str, evidence: Evidence) -> None:
        """Write the weights of a grown target, and attach its graph to them.

        Raises: NotRunError where the disk is too small or the graph is missing.
        """
        from growth.shape import PRESETS
        from inflate import inflate
        from specrt_export.portable.attachment import attach_graph

        source, shape = self._grown(size), PRESETS[size]
        evidence.add(reused=source.graph.is_file())
        if source.graph.is_file():
            return
        if not self.graph(size).is_file():
            raise NotRunError(f"the graph of {size} is missing: the step {size}.export makes it")
        parameters = shape.parameters(_geometry(codelet_source("target")).vocab_size, tied=False)
        # The checkpoint, a plan that holds matrices in two layouts, and the lowered weights.
        copies = 1 + 1.6 + (1 if self.settings.scratch is None else 0)
        self._require_disk(int(parameters * 2 * copies))
        shutil.rmtree(source.weights.parent, ignore_errors=True)
        source.weights.parent.mkdir(parents=True)
        began = time.monotonic()
        small = Checkpoint.open(CODELET / "checkpoint" / "target")
        inflate(small, source.weights, shape, "float16")
        evidence.add(parameters=parameters, grow_seconds=round(time.monotonic() - began, 1))
        evidence.add(distinct_bytes=make_distinct(source.weights))
        attach_graph(self.graph(size), Checkpoint.open(source.weights), source.graph)

    def _grown(self, size: str) -> Source:
        folder = self.settings.work / f"grown-{size}"
        return Source(folder / "target.onnx", folder / "weights")

    def build_target(self, size: str, precision: str, backend: str, evidence: Evidence) -> None:
        """Build a grown target; one that was built from the same stays.

        Raises: NotRunError where it was not grown, or the machine cannot build it.
        """
        self._require_builder(backend)
        source, out = self._grown(size), self.engine_folder(size, precision, backend)
        if not source.graph.is_file():
            raise NotRunError(f"{size} was not grown: the step {size}.grow comes first")
        version = open_library(backend).version if backend in TENSORRT else ""
        settings = self.settings
        origin = f"{precision} {backend} {version} {settings.gammas} {settings.capabilities}"
        digest = hashlib.sha256(origin.encode() + source.graph.read_bytes()).hexdigest()
        if (out / FACTS).is_file() and self.built(out).source == digest:
            evidence.add(reused=True)
            return
        scratch = self.settings.weights_folder / f"{out.name}.quantized"
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            if precision in SCALED:
                method = Precision.of(precision, per_row=backend in TENSORRT)
                quantized = quantize(source.graph, source.weights, scratch, method)
                source = Source(quantized.graph, quantized.folder)
            built = self._compile(source, out, backend, evidence)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        built = replace(built, precision=precision, source=digest)
        built.write()
        evidence.add(read_bytes=built.read_bytes)

    def build_probe(self, backend: str, way: str, evidence: Evidence) -> Built:
        """Build codelet's draft in one way to open a backend."""
        out = self.settings.work / f"open-{way}-{backend}"
        bench = replace(self, settings=self.settings.opened(way if backend == RTX else ""))
        return bench._compile(codelet_source("draft"), out, backend, evidence)

    def _compile(self, source: Source, out: Path, backend: str, evidence: Evidence) -> Built:
        if backend in TENSORRT:
            return self._build_plan(source, out, backend, evidence)
        return self._build_ort_cuda(source, out)

    def _build_ort_cuda(self, source: Source, out: Path) -> Built:
        shutil.rmtree(out, ignore_errors=True)
        captured = max(self.settings.gammas) + 1
        model = compile_ort_cuda(source.graph, source.weights, out, MAX_LENGTH, captured=captured)
        return Built(out / ENGINE, "ort-cuda", model.geometry, (out / WEIGHTS).stat().st_size)

    def _build_plan(self, source: Source, out: Path, backend: str, evidence: Evidence) -> Built:
        """Build a plan that the runtime opens; nothing is compared with a CPU here."""
        library = open_library(backend)
        form = NATIVE if library.native else DECOMPOSED
        lowered, began = self.settings.weights_folder / f"{out.name}.lowered", time.monotonic()
        target = lower(source, lowered, form)
        evidence.add(lower_seconds=round(time.monotonic() - began, 1))
        capabilities = self.settings.capabilities if backend == RTX else ()
        options = PlanOptions(candidates=target.candidates, capabilities=capabilities)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        plan = build_plan(
            lowered / ENGINE, out / PLAN, library,
            profiles(source.role, PREFILL, self.settings.gammas), options,
            lambda stage, done: None, form=form,
        )  # fmt: skip
        (out / FILE_NAME).write_text(plan.record.to_json(), encoding="utf-8")
        built = Built(out / PLAN, backend, target.geometry, (lowered / WEIGHTS).stat().st_size)
        built.write()
        shutil.rmtree(lowered)
        evidence.add(
            build_seconds=round(plan.seconds, 1), plan_bytes=plan.record.plan_bytes,
            weight_bytes=plan.record.weight_bytes, library=plan.record.version,
            profiles=_profiles(plan.record),
        )  # fmt: skip
        return built

    def require_precision(self, precision: str) -> None:
        """Raise NotRunError for fp8 on a GPU that has none."""
        gpus = self.survey().gpus
        capability = gpus[0].capability if gpus else ""
        if precision == "fp8" and capability and float(capability) < FP8_FROM:
            raise NotRunError(f"fp8 needs capability {FP8_FROM}, and this GPU has {capability}")

    def _require_builder(self, backend: str) -> None:
        if backend in TENSORRT and (reason := lacks_to_build(backend, self.survey())):
            raise NotRunError(reason)

    def _require_disk(self, size: int) -> None:
        self.settings.work.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(self.settings.work).free / 1e9, size * SPARE_DISK / 1e9
        if free < needed:
            raise NotRunError(f"{needed:.0f} GB of disk are needed, and {free:.0f} are free")


def codelet_source(role: str) -> Source:
    """Return codelet's portable graph and weights."""
    return Source(CODELET / "portable" / f"{role}.onnx", CODELET / "checkpoint" / role, role)


def lower(source: Source, out: Path, form: str) -> TensorRtTarget:
    """Write the graph that TensorRT parses, and its weights, into a new folder.

    TensorRT may take attention apart where it has no kernel for it.
    """
    portable, geometry = read_graph(source.graph), _geometry(source)
    target = TensorRtTarget(
        geometry, MAX_LENGTH, 1, "fp16", form, min(CANDIDATES, geometry.vocab_size),
        source.role == "draft",
    )  # fmt: skip
    lowered = lower_tensorrt(portable, stored_weights(portable, source.weights), target)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_engine(lowered.model, lowered.weights, out)
    graph = onnx.load(out / ENGINE, load_external_data=False)
    mark_decomposable(graph)
    (out / ENGINE).write_bytes(graph.SerializeToString(deterministic=True))
    return target


def write_head(folder: Path) -> None:
    """Write a random EAGLE-3 head for codelet's target, the same every time."""
    from growth.shards import Entry, write_shards

    target = json.loads((CODELET / "checkpoint" / "target" / "config.json").read_text("utf-8"))
    width, inner, size = target["hidden_size"], target["intermediate_size"], target["head_dim"]
    reads = [1, target["num_hidden_layers"] // 2, target["num_hidden_layers"] - 1]
    heads, kv = (target[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    layer, rng = "layers.0.", np.random.default_rng(0)
    shapes = {
        "fc": (width, len(reads) * width), "lm_head": (target["vocab_size"], width),
        f"{layer}self_attn.q_proj": (heads, 2 * width), f"{layer}self_attn.k_proj": (kv, 2 * width),
        f"{layer}self_attn.v_proj": (kv, 2 * width), f"{layer}self_attn.o_proj": (width, heads),
        f"{layer}mlp.gate_proj": (inner, width), f"{layer}mlp.up_proj": (inner, width),
        f"{layer}mlp.down_proj": (width, inner),
    }  # fmt: skip
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    made = {name: rng.normal(size=shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    made |= {name: np.ones(width) for name in ("norm", *(f"{layer}{one}" for one in norms))}
    arrays = {f"{name}.weight": np.asarray(array, np.float16) for name, array in made.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
        "model_type": "speculator_model", "draft_vocab_size": target["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": reads,
        "transformer_layer_config": {**target, "num_hidden_layers": 1},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_shards(
        folder,
        [Entry(n, "F16", a.shape, a.nbytes, lambda a=a: a) for n, a in arrays.items()],  # type: ignore[misc]
    )


def make_distinct(folder: Path) -> int:
    """Make fp16 matrices of zeros in a grown checkpoint differ; return their bytes.

    TensorRT keeps equal weights once: of codelet grown to 1 B it kept 1.69 of 1.98 GB, because what
    added layers write into the residual stream is all zeros. These become the smallest numbers of
    fp16, 6e-8, with random signs: too small to move a score by what fp16 rounds.
    """
    rng, written, chunk = np.random.default_rng(0), 0, 1 << 24
    for shard in sorted(folder.glob("*.safetensors")):
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] != "F16" or len(entry["shape"]) != 2:
                continue
            begin, shape = 8 + length + entry["data_offsets"][0], (prod(entry["shape"]),)
            bits: Any = np.memmap(shard, np.uint16, "r+", offset=begin, shape=shape)
            if not (bits[: entry["shape"][1]] & 0x7FFF).any() and not (bits & 0x7FFF).any():
                for at in range(0, bits.size, chunk):
                    part = bits[at : at + chunk]
                    part[:] = rng.integers(0, 2, part.size, np.uint16) << 15 | 1
                written += bits.nbytes
            del bits
    return written


def _geometry(source: Source) -> Geometry:
    return geometry_of(read_graph(source.graph))


def _profiles(record: EngineRecord) -> dict[str, Any]:
    return {
        one.profile: {"kernels": one.launches, "attention": one.attention}
        for one in record.compiled
    }
