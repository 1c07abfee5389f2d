"""Plans with inputs that the runtime does not know: built, bound and launched by hand."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpucheck.step import CheckError
from specrt.engine.tensorrt.engine_record import Compiled, Profile, Range
from specrt.engine.tensorrt.library import Library
from specrt.engine.tensorrt.plan import ITEM_BYTES, Plan
from specrt_export.compile.monitor import compiled, printable
from specrt_export.compile.network import parse

Sizes = Mapping[str, tuple[int, ...]]
"""Shapes of inputs by name."""


def build_bare(
    library: Library, graph: Path, out: Path, shapes: Mapping[str, Sizes], *, capability: str = "",
    aux_streams: int | None = None,
) -> tuple[Compiled, ...]:  # fmt: skip
    """Build a plan with a profile for each named set of shapes, each of one size.

    `capability` is a name that the library of TensorRT for RTX has for one; its choice when empty.
    Raises: BuildError where the graph does not parse; CheckError where no plan is made.
    """
    module = library.module
    with library.messages() as log:
        builder = module.Builder(library.logger)
        network = builder.create_network(_flags(module))
        parse(library, network, graph)
        config = builder.create_builder_config()
        config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
        if aux_streams is not None:
            config.max_aux_streams = aux_streams
        if capability:
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(module.ComputeCapability, capability), 0)
        for sizes in shapes.values():
            profile = builder.create_optimization_profile()
            for name, shape in sizes.items():
                profile.set_shape(name, shape, shape, shape)
            config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        errors = [m.text for m in log.messages if m.is_error]
        # Without a driver it says so several times, whatever the reason is.
        telling = [text for text in errors if "cudaError 35" not in text] or errors
        raise CheckError(f"no plan was made: {printable(telling[0]) if telling else 'no reason'}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(memoryview(plan))
    one = Range(1, 1, 1)
    return compiled(log.messages, [Profile(name, one, one) for name in shapes])


def _flags(module: Any) -> int:
    kind = getattr(module, "NetworkDefinitionCreationFlag", None)
    flag = getattr(kind, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


class Caches:
    """KV buffers that several plans of one model read in turn, filled with small numbers."""

    def __init__(self, device: Any, plan: Plan) -> None:
        self._device = device
        self.places: dict[str, int] = {}
        names = [n for n, t in plan.tensors.items() if t.is_input and n.startswith(("key.", "val"))]
        rng = np.random.default_rng(0)
        for name in names:
            shape = plan.tensors[name].shape
            size = prod(shape) * ITEM_BYTES[plan.tensors[name].type]
            self.places[name] = device.allocate(size, "KV buffers of an experiment")
            staged = device.stage(size)
            staged.host.view(np.float16)[:] = rng.standard_normal(prod(shape)) / 4
            staged.send()
            device.copy(self.places[name], staged.address, size)
            device.wait()


class Bare:
    """One profile of a plan with all its tensors bound, captured as a graph on its first run."""

    def __init__(self, plan: Plan, device: Any, profile: int, sizes: Sizes, caches: Caches) -> None:
        self._device, self._plan = device, plan
        self._fed: dict[str, Any] = {}
        self._graph: Any = None
        self.rows = sizes["rows"][0]
        scratch = plan.scratch_bytes(profile)
        at = device.allocate(scratch, "working memory of an experiment") if scratch else 0
        self._context = plan.context(profile, at)
        self._outputs: dict[str, int] = {}
        for name, tensor in plan.tensors.items():
            if tensor.is_input and -1 in tensor.shape:
                self._context.set_shape(name, sizes[name])
            self._context.set_address(name, self._place(name, tensor, sizes, caches))

    def _place(self, name: str, tensor: Any, sizes: Sizes, caches: Caches) -> int:
        if name in caches.places:
            return caches.places[name]
        if name.removeprefix("present_") in caches.places:
            return caches.places[name.removeprefix("present_")]
        shape = sizes.get(name, tuple(self.rows if n == -1 else n for n in tensor.shape))
        size = prod(shape) * ITEM_BYTES[tensor.type]
        if tensor.is_input:
            self._fed[name] = self._device.stage(size)
            return int(self._fed[name].address)
        self._outputs[name] = self._device.allocate(size, "results of an experiment")
        return self._outputs[name]

    def feed(self, **values: NDArray[np.int64]) -> None:
        """Give the inputs; those whose numbers are never read stay 0."""
        for name, value in values.items():
            host = self._fed[name].host.view(np.int64)
            host[: value.size] = value.reshape(-1)
            self._fed[name].send()
        self._device.wait()

    def run(self) -> None:
        """Run once, kernel by kernel at first, and capture."""
        self._context.enqueue()
        self._device.wait()
        if self._graph is None:
            with self._device.capture() as recording:
                self._context.enqueue()
            self._graph = recording.graph

    def launch(self) -> None:
        """Put the captured pass on the stream."""
        self._graph.launch()

    def logits(self, vocabulary: int) -> NDArray[np.float32]:
        """Read the scores."""
        found = np.empty((1, self.rows, vocabulary), np.float32)
        self._device.read(self._outputs["logits"], found)
        return found

    def close(self) -> None:
        """Give the graph back."""
        if self._graph is not None:
            self._graph.free()
            self._graph = None


def inputs(width: int, start: int, vocabulary: int) -> dict[str, NDArray[np.int64]]:
    """Return what a pass of a width is fed."""
    rng = np.random.default_rng(width)
    return {
        "input_ids": rng.integers(0, vocabulary, (1, width)),
        "start": np.array([start]),
        "rows": np.arange(width),
    }


def shapes_of(width: int, extent: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a profile of one width fixes."""
    sizes: dict[str, tuple[int, ...]] = {"input_ids": (1, width), "rows": (width,)}
    return sizes if extent is None else {**sizes, "extent": (extent,)}
