"""What steps work with: a GPU, codelet's bundles and grown targets, and engines over them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpucheck.evidence import NotRunError
from gpucheck.inventory import TENSORRT
from gpucheck.settings import ATTENTION, CODELET, RunSettings
from specrt.bundle import read_manifest
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.cuda_engine import OrtCudaEngine
from specrt.engine.protocol import Engine
from specrt.engine.tensorrt.device import CudaDevice, cuda_bindings
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.engine_record import FILE_NAME, EngineRecord, read_engine_record
from specrt.engine.tensorrt.fused_round import fused_rounds
from specrt.engine.tensorrt.head import TensorRtHead
from specrt.engine.tensorrt.library import open_library
from specrt.engine.tensorrt.plan import open_plan
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.geometry import Geometry
from specrt.loading import load
from specrt.records import read
from specrt.speculation.pool import Models
from specrt.system.gpu import Survey, survey
from specrt.text.tokenizer import Tokenizer
from specrt_export.compile.compiler import GraphSource
from specrt_export.compile.network import CURRENT
from specrt_export.portable.graph import GraphRun

RTX = "tensorrt-rtx"
FACTS = "built.json"
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class Built:
    """One compiled model, as it is known without opening it."""

    path: Path
    """The plan, or the graph of ort-cuda."""
    backend: str
    geometry: Geometry
    read_bytes: int
    """Of weights: what a pass has to read at least, each once."""
    precision: str
    max_length: int
    max_width: int
    source: str = ""
    """Hash of all that it was built from."""

    @property
    def record(self) -> EngineRecord:
        """What is known of a plan."""
        return read_engine_record(self.path.with_name(FILE_NAME))

    def write(self) -> None:
        """Write all this next to the engine."""
        data = {**asdict(self), "path": self.path.name, "geometry": asdict(self.geometry)}
        self.path.with_name(FACTS).write_text(json.dumps(data), encoding="utf-8")


@dataclass
class Workbench:
    """Opens what a step needs; tests replace what needs a GPU."""

    settings: RunSettings = field(default_factory=RunSettings)

    def survey(self) -> Survey:
        """Return what the driver tells of this machine."""
        return survey()

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
        """Open a target with its draft, on one device."""
        tokenizer = Tokenizer(CODELET / "checkpoint" / "target" / "tokenizer.json", None)
        with self.engines(target, draft) as engines:
            gammas = (0, *self.settings.gammas)
            one, other = engines
            if isinstance(other, TensorRtEngine) and other.model.record.hidden:
                other = TensorRtHead(other, one)
            yield Generator(Models(one, other, gammas, rounds=fused_rounds(one, other)), tokenizer)

    def bundle(self, pair: str, backend: str) -> AbstractContextManager[Generator]:
        """Open a bundle as a user would, but for plans of another GPU, which no user could."""
        models = [self.codelet(backend, role, pair) for role in ("target", "draft")]
        if backend == RTX and self.settings.capabilities not in ((), (CURRENT,)):
            return self.pair(*models)
        return self.loaded(self.folder(pair, backend))

    def loaded(self, bundle: Path) -> AbstractContextManager[Generator]:
        """Open a bundle as a user would."""
        return load(bundle, text_memory_bytes=0)

    def reference(self, role: str) -> GraphRun:
        """Return codelet's portable graph in fp32 on the CPU."""
        source = codelet_source(role)
        return GraphRun(source.graph, source.weights)

    def folder(self, name: str, backend: str) -> Path:
        """Return the folder of a bundle, or of a grown target's engine."""
        return self.settings.work / f"{name}-{backend}"

    def codelet(self, backend: str, role: str, pair: str = "codelet") -> Built:
        """Return a model of codelet's bundle.

        Raises: NotRunError where it was not built.
        """
        folder = self.folder(pair, backend)
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
        folder = self.folder(f"{size}-{precision}", backend)
        if not (folder / FACTS).is_file():
            raise NotRunError(f"{folder.name} was not built: its build step comes first")
        data = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        data |= {
            "geometry": read(Geometry, data["geometry"], "geometry"),
            "path": folder / data["path"],
        }
        return Built(**data)


def codelet_source(role: str) -> GraphSource:
    """Return codelet's portable graph and weights."""
    return GraphSource(CODELET / "portable" / f"{role}.onnx", CODELET / "checkpoint" / role)
